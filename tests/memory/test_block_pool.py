"""The pool against the obvious model: a dict of reference counts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.memory.block_pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """Random holders come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(5)
        self.counts: dict[int, int] = {}

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block not in self.counts, "a block in use was handed out again"
        assert 0 <= block < 5
        self.counts[block] = 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.counts[block] += 1
        assert self.pool.retain(block) == self.counts[block]

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.counts[block] -= 1
        assert self.pool.release(block) == self.counts[block]
        if not self.counts[block]:
            del self.counts[block]

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == 5 - len(self.counts)
        assert all(self.pool.refs(block) == self.counts.get(block, 0) for block in range(5))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def test_an_empty_pool_hands_out_nothing() -> None:
    pool = BlockPool(1)
    pool.allocate()
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_free_block_can_neither_be_shared_nor_freed_again() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match=f"block {block} is free"):
        pool.retain(block)
    with pytest.raises(AssertionError, match=f"block {block} is free already"):
        pool.release(block)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks is 0"):
        BlockPool(0)


def test_integrity_names_a_block_that_is_free_and_in_use() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool._free.append(block)
    with pytest.raises(AssertionError, match=f"block {block} has 1 references, on free list: True"):
        pool.check_integrity()
