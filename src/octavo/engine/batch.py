"""From a plan's chunks to arrays: the only place where positions become slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import ScheduledChunk
from octavo.core.records import hot_record
from octavo.kernels.base import Draw, ModelInput

_NO_BLOCK = bytes(4)  # int32 0: pads the rows of a block table
_INT32 = np.dtype(np.int32)
_NO_COPIES = np.zeros((0, 3), _INT32)
_COUNTING = np.arange(4097, dtype=_INT32)  # where each sequence runs one token, its row is its index


@hot_record
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

    A position p of a sequence lies in slot ``block_ids[p // block_size] * block_size + p % block_size``. One walk fills
    lists, which become arrays at the end: a call of numpy costs as much as ten numbers appended.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    context_lens: list[int] = []
    draws: list[Draw] = []
    draw_chunks: list[int] = []
    draw_rows: list[int] = []
    targets: list[tuple[int, int]] = []
    target_chunks: list[int] = []
    target_rows: list[int] = []
    num_one_query_seqs = row = 0  # row: the first one of the chunk
    for index, chunk in enumerate(chunks):
        start, block_ids = chunk.start, chunk.block_ids
        end = start + len(chunk.token_ids)
        if end - start == 1:
            assert num_one_query_seqs == index, "one-token chunks come first"
            num_one_query_seqs += 1
            positions.append(start)
            slots.append(block_ids[start // block_size] * block_size + start % block_size)
        else:
            positions += range(start, end)
            slots += _slots(block_ids, start, end, block_size)
        token_ids += chunk.token_ids
        if chunk.want_logprobs:
            targets += [(chunk.history[position], chunk.num_prompt_logprobs) for position in chunk.want_logprobs]
            target_rows += [row + position - 1 - start for position in chunk.want_logprobs]
            target_chunks += [index] * len(chunk.want_logprobs)
        row += end - start
        query_starts.append(row)
        context_lens.append(end)
        if chunk.draw is not None:
            # without keywords: see hot_record
            draws.append(Draw(chunk.draw, chunk.stream, end, chunk.history, chunk.prompt_len, chunk.banned_token_ids))
            draw_chunks.append(index)
            draw_rows.append(row - 1)
    count = len(chunks)
    if len(draws) == num_one_query_seqs == count < len(_COUNTING) and not targets:
        starts_array, rows_array = _COUNTING[: count + 1], _COUNTING[:count]
    else:
        starts_array, rows_array = np.array(query_starts, _INT32), np.array(draw_rows + target_rows, _INT32)
    step = ModelInput(
        token_ids=np.array(token_ids, _INT32),
        positions=np.array(positions, _INT32),
        logit_rows=rows_array,
        slot_mapping=np.array(slots, _INT32),
        block_tables=_block_tables(chunks),
        query_starts=starts_array,
        context_lens=np.array(context_lens, _INT32),
        num_one_query_seqs=num_one_query_seqs,
        copies=np.array(block_copies, _INT32).reshape(-1, 3) if block_copies else _NO_COPIES,
    )
    return Batch(step, draws, draw_chunks, targets, target_chunks)


def _slots(block_ids: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end), block by block."""
    slots: list[int] = []
    for block in block_ids[start // block_size : -(-end // block_size)]:
        slots += range(block * block_size, (block + 1) * block_size)
    first = start % block_size
    return slots[first : first + end - start]


def _block_tables(chunks: Sequence[ScheduledChunk]) -> NDArray[np.int32]:
    """[S, B] block ids, padded with 0, B the longest table's number of blocks."""
    widths = [len(chunk.block_ids) for chunk in chunks]
    width = max(widths, default=0)
    parts: list[Any] = [chunk.block_ids for chunk in chunks]  # buffers of int32
    if min(widths, default=0) < width:
        padding = [_NO_BLOCK * (width - used) for used in widths]
        parts = list(chain.from_iterable(zip(parts, padding, strict=True)))
    return np.frombuffer(bytearray().join(parts), _INT32).reshape(len(chunks), width)
