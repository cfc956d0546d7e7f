"""From a plan's chunks to one array: the only place where positions become slots."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

from octavo.core.plan import DrawRule, ScheduledChunk
from octavo.core.records import hot_record
from octavo.kernels.base import ModelInput

_NO_BLOCK = bytes(4)  # int32 0: pads the rows of a block table


@hot_record
class Batch:
    """One pass over some chunks: what the backend needs, and which chunk each result belongs to."""

    step: ModelInput
    draws: list[DrawRule]
    history_lens: list[int]  # tokens before each draw; []: to all the histories are what they are
    draw_chunks: Sequence[int]  # index into the given chunks, per draw
    targets: list[tuple[int, int]]  # (token id, alternatives), per prompt-logprob row
    target_chunks: list[int]


def build_batch(
    chunks: Sequence[ScheduledChunk], block_copies: Sequence[tuple[int, int, int, int]], block_size: int
) -> Batch:
    """Lay chunks out as one ModelInput. One-token chunks must come first (StepPlan's order).

    In each cache group a sequence's position p lies in slot ``table[p // block_size] * block_size + p % block_size``.
    """
    lengths = [len(chunk.token_ids) for chunk in chunks]
    count, num_one_query_seqs = len(chunks), lengths.count(1)
    ones, longer = chunks[:num_one_query_seqs], chunks[num_one_query_seqs:]
    assert 1 not in lengths[num_one_query_seqs:], "one-token chunks come first"
    positions = [chunk.start for chunk in ones]
    token_ids = [chunk.token_ids[0] for chunk in ones]
    context_lens = [start + 1 for start in positions]
    num_groups = len(chunks[0].block_tables) if chunks else 1
    slots: list[int] = []
    for group in range(num_groups):
        slots += [
            chunk.block_tables[group][start // block_size] * block_size + start % block_size
            for chunk, start in zip(ones, positions, strict=True)
        ]
        for chunk in longer:
            slots += _slots(chunk.block_tables[group], chunk.start, chunk.end, block_size)
    for chunk in longer:
        start, end = chunk.start, chunk.end
        token_ids += chunk.token_ids
        positions += range(start, end)
        context_lens.append(end)
    draws = [chunk.draw for chunk in chunks if chunk.draw is not None]
    history_lens: list[int] = []
    asked = [index for index, chunk in enumerate(chunks) if chunk.want_logprobs is not None]
    query_starts: Sequence[int] = range(count + 1)
    draw_chunks: Sequence[int] = range(count)
    rows: Sequence[int] = draw_chunks
    targets: list[tuple[int, int]] = []
    target_chunks: list[int] = []
    if longer or asked or len(draws) < count:
        query_starts = [0, *accumulate(lengths)]
        draw_chunks = [index for index, chunk in enumerate(chunks) if chunk.draw is not None]
        rows = [query_starts[index + 1] - 1 for index in draw_chunks]
        if any(chunk.draw_positions is not None for chunk in longer):
            places = [(index, position) for index in draw_chunks for position in chunks[index].drawing]
            draw_chunks = [index for index, _ in places]
            rows = [query_starts[index] + position - chunks[index].start for index, position in places]
            history_lens = [position + 1 for _, position in places]
            draws = [
                rule.for_position(position + 1)
                for index, position in places
                if (rule := chunks[index].draw) is not None
            ]
        target_rows: list[int] = []
        for index in asked:
            wanted, first = chunks[index].want_logprobs, query_starts[index] - chunks[index].start
            assert wanted is not None
            targets += [(token, wanted.num_alternatives) for token in wanted.token_ids]
            target_chunks += [index] * len(wanted.positions)
            target_rows += [first + position - 1 for position in wanted.positions]
        rows = [*rows, *target_rows]
    copies = chain.from_iterable(block_copies)
    ints = array("i", [*token_ids, *positions, *slots, *rows, *query_starts, *context_lens, *copies])
    ints.frombytes(_block_tables(chunks, num_groups))
    step = ModelInput(ints, len(token_ids), len(rows), count, len(block_copies), num_one_query_seqs, num_groups)
    return Batch(step, draws, history_lens, draw_chunks, targets, target_chunks)


def _slots(block_ids: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    """Slots of positions [start, end), block by block."""
    slots: list[int] = []
    for block in block_ids[start // block_size : -(-end // block_size)]:
        slots += range(block * block_size, (block + 1) * block_size)
    first = start % block_size
    return slots[first : first + end - start]


def _block_tables(chunks: Sequence[ScheduledChunk], num_groups: int) -> bytes:
    """[G, S, B] block ids, padded with 0, B the longest table's number of blocks."""
    parts: list[Any] = [chunk.block_tables[group] for group in range(num_groups) for chunk in chunks]  # of int32
    widths = list(map(len, parts))
    width = max(widths, default=0)
    if min(widths, default=0) < width:
        padding = [_NO_BLOCK * (width - used) for used in widths]
        parts = list(chain.from_iterable(zip(parts, padding, strict=True)))
    return b"".join(parts)
