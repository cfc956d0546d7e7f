"""From a plan's chunks to arrays: the only place where positions become slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
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

    A position p of a sequence lies in slot ``block_ids[p // block_size] * block_size + p % block_size``. Lists are made
    column by column and become arrays at the end: a call of numpy costs as much as ten numbers.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    count, num_one_query_seqs = len(chunks), lengths.count(1)
    ones, longer = chunks[:num_one_query_seqs], chunks[num_one_query_seqs:]
    assert 1 not in lengths[num_one_query_seqs:], "one-token chunks come first"
    positions = [chunk.start for chunk in ones]
    token_ids = [chunk.token_ids[0] for chunk in ones]
    slots = [
        chunk.block_ids[start // block_size] * block_size + start % block_size
        for chunk, start in zip(ones, positions, strict=True)
    ]
    context_lens = [start + 1 for start in positions]
    for chunk in longer:
        start, end = chunk.start, chunk.end
        token_ids += chunk.token_ids
        positions += range(start, end)
        slots += _slots(chunk.block_ids, start, end, block_size)
        context_lens.append(end)
    draws = [
        # without keywords: see hot_record
        Draw(chunk.draw, chunk.stream, end, chunk.history, chunk.prompt_len, chunk.banned_token_ids)
        for chunk, end in zip(chunks, context_lens, strict=True)
        if chunk.draw is not None
    ]
    asked = [index for index, chunk in enumerate(chunks) if chunk.want_logprobs]
    targets: list[tuple[int, int]] = []
    target_chunks: list[int] = []
    if len(draws) == num_one_query_seqs == count < len(_COUNTING) and not asked:
        draw_chunks, starts_array, rows_array = list(range(count)), _COUNTING[: count + 1], _COUNTING[:count]
    else:
        query_starts = [0, *accumulate(lengths)]
        draw_chunks = [index for index, chunk in enumerate(chunks) if chunk.draw is not None]
        rows = [query_starts[index + 1] - 1 for index in draw_chunks]
        for index in asked:
            chunk, first = chunks[index], query_starts[index] - chunks[index].start
            targets += [(chunk.history[position], chunk.num_prompt_logprobs) for position in chunk.want_logprobs]
            target_chunks += [index] * len(chunk.want_logprobs)
            rows += [first + position - 1 for position in chunk.want_logprobs]
        starts_array, rows_array = np.array(query_starts, _INT32), np.array(rows, _INT32)
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
