"""Draws ahead: tokens that somebody guesses are run behind the last known one, and each is checked by a draw.

Exact, since a draw is a pure function of its logits, its rule, the tokens before it and its position: a draw behind a
right guess is the draw of the step after, and one behind a wrong guess does not count. Nobody guesses yet. A model with
a recurrent state drafts nothing: a state that has run over a wrong guess cannot be taken back.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Protocol

from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.draft import Draft
from octavo.scheduler.sequence import Sequence


class Drafter(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, seq: Sequence, most: int) -> Iterable[int]:
        """Tokens of the vocabulary that may follow ``seq.tokens``; more than ``most`` are not looked at."""
        ...


def place_drafts(drafter: Drafter, draft: Draft, manager: KVCacheManager, max_num_batched_tokens: int) -> None:
    """Put drafted tokens behind decodes, in what the step has left. Nobody is preempted for them.

    A block's worth at most, so that a sequence never holds more than the one block beyond its known tokens that
    admission keeps for it anyway. A step that verifies draws up to one token more than was drafted.
    """
    left = max_num_batched_tokens - sum(num_tokens for num_tokens, _ in draft.placed.values())
    for seq, (_, reason) in tuple(draft.placed.items()):
        end = len(seq.tokens)
        most = min(left, seq.longest - end - 1, manager.block_size)
        if reason != "decode" or most <= 0:
            continue
        drafted = list(islice(drafter.propose(seq, most), most))
        assert seq.table is not None
        del drafted[manager.grow(seq.table, end + len(drafted)) - end :]
        if drafted:
            seq.draft(drafted)
            draft.placed[seq] = (1 + len(drafted), "verify")
            left -= len(drafted)
