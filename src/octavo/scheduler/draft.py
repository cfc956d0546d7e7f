"""The plan of a step while it is made, and while it runs."""

from __future__ import annotations

from collections.abc import Sequence as AnySequence
from typing import NamedTuple

from octavo.core.plan import Admission, ChunkReason, StepPlan, WaitReason
from octavo.scheduler.cost_model import StepLoad
from octavo.scheduler.sequence import Sequence

DECODE: tuple[int, ChunkReason] = (1, "decode")


class Draft:
    """Who runs how many tokens, who has joined, who had to leave, and why others wait."""

    __slots__ = ("admitted", "now", "placed", "preempted", "step_id", "waiting_for")

    def __init__(self, step_id: int, now: float) -> None:
        self.step_id = step_id
        self.now = now
        self.placed: dict[Sequence, tuple[int, ChunkReason]] = {}  # tokens to run, and why so many
        self.admitted: list[Admission] = []
        self.preempted: list[str] = []
        self.waiting_for: dict[str, WaitReason] = {}

    def place(self, seq: Sequence, num_tokens: int, reason: ChunkReason) -> None:
        """``seq`` runs this many prefill tokens."""
        self.placed[seq] = (num_tokens, reason)
        seq.held_up_since_s = self.now


class OpenStep(NamedTuple):
    """A plan that runs."""

    plan: StepPlan
    sequences: AnySequence[Sequence]  # of its chunks, one by one
    load: StepLoad
    prefill_tokens: int
