"""From a plan's chunks to arrays: the only place where positions become slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import ScheduledChunk
from octavo.kernels.base import Draw, ModelInput


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One pass over some chunks: what the backend needs, and which chunk each result belongs to."""

    step: ModelInput
    draws: list[Draw]
    draw_chunks: list[int]  # index into the given chunks, per draw
    targets: list[tuple[int, int]]  # (token id, alternatives), per prompt-logprob row
    target_chunks: list[int]


def build_batch(
    chunks: Sequence[ScheduledChunk], block_copies: Sequence[tuple[int, int, int]], block_size: int
) -> Batch:
    """Lay chunks out as one ModelInput. One-token chunks must come first (StepPlan's order).

    A position p of a sequence lies in slot ``block_ids[p // block_size] * block_size + p % block_size``.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    draws: list[Draw] = []
    draw_chunks: list[int] = []
    draw_rows: list[int] = []
    targets: list[tuple[int, int]] = []
    target_chunks: list[int] = []
    target_rows: list[int] = []
    num_one_query_seqs = 0
    for index, chunk in enumerate(chunks):
        first_row, start, end = len(token_ids), chunk.start, chunk.end
        token_ids.extend(chunk.token_ids)
        if end - start == 1:
            assert num_one_query_seqs == index, "one-token chunks come first"
            num_one_query_seqs += 1
            positions.append(start)
        else:
            positions.extend(range(start, end))
        query_starts.append(len(token_ids))
        context_lens.append(end)
        if chunk.draw is not None:
            draws.append(_draw_of(chunk))
            draw_chunks.append(index)
            draw_rows.append(len(token_ids) - 1)
        for position in chunk.want_logprobs:
            targets.append((chunk.history[position], chunk.num_prompt_logprobs))
            target_chunks.append(index)
            target_rows.append(first_row + position - 1 - start)
    position_array = np.array(positions, dtype=np.int32)
    query_array = np.array(query_starts, dtype=np.int32)
    tables = _block_tables(chunks, context_lens, block_size)
    step = ModelInput(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=position_array,
        logit_rows=np.array(draw_rows + target_rows, dtype=np.int32),
        slot_mapping=_slots(position_array, query_array, tables, block_size),
        block_tables=tables,
        query_starts=query_array,
        context_lens=np.array(context_lens, dtype=np.int32),
        num_one_query_seqs=num_one_query_seqs,
        copies=np.array(block_copies, dtype=np.int32).reshape(-1, 3),
    )
    return Batch(step=step, draws=draws, draw_chunks=draw_chunks, targets=targets, target_chunks=target_chunks)


def _draw_of(chunk: ScheduledChunk) -> Draw:
    assert chunk.draw is not None
    return Draw(
        params=chunk.draw,
        stream=chunk.stream,
        position=chunk.end,
        history=chunk.history,
        prompt_len=chunk.prompt_len,
        banned_token_ids=chunk.banned_token_ids,
    )


def _block_tables(chunks: Sequence[ScheduledChunk], context_lens: Sequence[int], block_size: int) -> NDArray[np.int32]:
    """[S, B] block ids, padded with 0, B the longest context's number of blocks."""
    widths = [-(-length // block_size) for length in context_lens]
    tables = np.zeros((len(chunks), max(widths, default=0)), dtype=np.int32)
    for row, chunk, width in zip(tables, chunks, widths, strict=True):
        row[:width] = np.frombuffer(chunk.block_ids, dtype=np.int32, count=width)  # type: ignore[call-overload]
    return tables


def _slots(
    positions: NDArray[np.int32], query_starts: NDArray[np.int32], tables: NDArray[np.int32], block_size: int
) -> NDArray[np.int32]:
    """[T] slot of each position, through its sequence's row of ``tables``."""
    sequence_of_row = np.repeat(np.arange(len(tables), dtype=np.int32), np.diff(query_starts))
    blocks, offsets = np.divmod(positions, np.int32(block_size))
    return np.ascontiguousarray(tables[sequence_of_row, blocks] * np.int32(block_size) + offsets)
