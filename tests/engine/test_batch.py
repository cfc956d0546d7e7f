from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from octavo.core.plan import DrawRule, ScheduledChunk, WantedLogprobs
from octavo.core.sampling_params import SamplingParams
from octavo.engine.batch import build_batch


def chunk(start: int, tokens: list[int], blocks: list[int], **fields: object) -> ScheduledChunk:
    return ScheduledChunk(
        request_id=f"r{start}", start=start, token_ids=tokens, block_tables=(memoryview(array("i", blocks)),), **fields
    )  # type: ignore[arg-type]


def test_every_position_gets_the_slot_that_its_block_table_names() -> None:
    rng = random.Random(0)
    for _ in range(200):
        block_size = rng.choice([1, 3, 16])
        chunks = []
        most_draw = rng.choice([0.0, 0.5, 1.0])
        for length in sorted(rng.choices([1, 1, 2, 5, 40] if rng.random() < 0.7 else [1], k=rng.randint(1, 6))):
            start = rng.randint(0, 50)
            blocks = rng.sample(range(1000), -(-(start + length) // block_size) + rng.randint(0, 2))
            draw = DrawRule(params=SamplingParams(), random_stream=0) if rng.random() < most_draw else None
            chunks.append(chunk(start, rng.choices(range(100), k=length), blocks, draw=draw))
        batch = build_batch(chunks, (), block_size)
        step = batch.step
        assert list(batch.draw_chunks) == [index for index, one in enumerate(chunks) if one.draw is not None]
        assert step.logit_rows.tolist() == [step.query_starts[index + 1] - 1 for index in batch.draw_chunks]
        assert [step.positions[row] + 1 for row in step.logit_rows] == [chunks[i].end for i in batch.draw_chunks]
        row = 0
        for index, one in enumerate(chunks):
            assert step.query_starts[index] == row
            assert step.context_lens[index] == one.end
            for offset, token in enumerate(one.token_ids):
                position = one.start + offset
                assert step.token_ids[row] == token
                assert step.positions[row] == position
                wanted = one.block_tables[0][position // block_size] * block_size + position % block_size
                assert step.slot_mapping[0, row] == wanted
                assert (
                    step.block_tables[0, index, position // block_size] == one.block_tables[0][position // block_size]
                )
                row += 1
        assert step.query_starts[-1] == row == len(step.token_ids)
        assert step.num_one_query_seqs == sum(len(one.token_ids) == 1 for one in chunks)
        names = "token_ids", "positions", "logit_rows", "slot_mapping", "block_tables", "query_starts", "context_lens"
        for name in names:
            value = getattr(step, name)
            assert value.dtype == np.int32
            assert value.flags.c_contiguous


def test_draw_rows_come_first_and_targets_name_the_predicted_token() -> None:
    rule = DrawRule(params=SamplingParams(temperature=0.0), random_stream=7)
    wanted = WantedLogprobs(positions=range(2, 5), token_ids=[12, 13, 14], num_alternatives=2)
    chunks = [
        chunk(4, [14], [0, 1, 2], draw=rule),
        chunk(1, [11, 12, 13], [3, 4, 5], want_logprobs=wanted),
    ]
    batch = build_batch(chunks, [(0, 1, 2, 1)], 2)
    assert batch.step.logit_rows.tolist() == [0, 1, 2, 3]
    assert batch.draw_chunks == [0]
    assert batch.draws == [rule]
    assert batch.targets == [(12, 2), (13, 2), (14, 2)]
    assert batch.target_chunks == [1, 1, 1]
    assert batch.step.copies.tolist() == [[0, 1, 2, 1]]


def test_one_token_chunks_must_come_first() -> None:
    with pytest.raises(AssertionError, match="come first"):
        build_batch([chunk(0, [1, 2], [0]), chunk(0, [1], [1])], (), 16)


def test_each_cache_group_has_slots_and_tables_of_its_own() -> None:
    def views(*tables: list[int]) -> tuple[memoryview[int], ...]:
        return tuple(memoryview(array("i", table)) for table in tables)

    chunks = [
        ScheduledChunk(request_id="a", start=5, token_ids=[7], block_tables=views([4, 5, 6], [-1, 8, 9])),
        ScheduledChunk(request_id="b", start=1, token_ids=[1, 2, 3], block_tables=views([0, 1], [2, 3])),
    ]
    step = build_batch(chunks, [(1, 6, 7, 1)], 2).step
    assert step.num_groups == 2
    assert step.slot_mapping.tolist() == [[13, 1, 2, 3], [19, 5, 6, 7]]
    assert step.block_tables.tolist() == [[[4, 5, 6], [0, 1, 0]], [[-1, 8, 9], [2, 3, 0]]]
    assert step.copies.tolist() == [[1, 6, 7, 1]]
    assert step.token_ids.tolist() == [7, 1, 2, 3]
