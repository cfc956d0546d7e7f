"""Whose turn it is: the order of the waiting queue, and who gives way when memory runs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Iterator

from octavo.core.config import Policy
from octavo.scheduler.sequence import Sequence

LOOKAHEAD = 256  # waiting requests looked at per step, so that a long queue cannot slow every step down


def by_rank(seq: Sequence) -> tuple[float, int]:
    return seq.rank


class QueuePolicy(ABC):
    """Holds the waiting sequences; writes ``Sequence.rank``, smallest first.

    The scheduler keeps running sequences sorted by rank too, and never preempts the first. A rank is fixed when the
    request arrives (a preempted one's may still fall), and only finitely many can be smaller, so each request becomes
    the first at some point and then finishes: preemption cannot go on forever.
    """

    def __init__(self) -> None:
        self._num_added = 0
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def add(self, seq: Sequence) -> None:
        """A new request starts to wait."""
        self._num_added += 1
        seq.rank = (self._order(seq), self._num_added)
        self._put(seq)

    def requeue(self, seq: Sequence) -> None:
        """A preempted sequence waits again, at the head of its class."""
        ranks = [other.rank for other in self._queue(seq) if self._same_class(other, seq)]
        if ranks and min(ranks) < seq.rank:
            order, number = min(ranks)
            seq.rank = (order, number - 1)
        self._put(seq)

    def remove(self, seq: Sequence) -> None:
        """A waiting sequence is admitted or has ended."""
        self._queue(seq).remove(seq)
        self._num_waiting -= 1

    def clear(self) -> None:
        """Forget whom it knows; all that are left will be added again."""
        self._num_waiting = 0

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who is preempted, of at least two running sequences sorted by rank; never the first."""
        return running[-1]

    def admitted(self, seq: Sequence, num_tokens: int) -> None:  # noqa: B027  (only "fair" counts)
        """``seq`` runs for the first time; ``num_tokens`` of its prompt were not cached."""

    def drew(self, seq: Sequence) -> None:  # noqa: B027
        """``seq`` got an output token."""

    def ended(self, seq: Sequence) -> None:  # noqa: B027
        """A sequence, no longer waiting, has ended."""

    @abstractmethod
    def candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in the order of admission. The caller may ``remove`` the one it was just given."""

    def _order(self, seq: Sequence) -> float:
        """First part of a new sequence's rank; ties go to the earlier arrival."""
        return 0.0

    @abstractmethod
    def _queue(self, seq: Sequence) -> list[Sequence]:
        """The sorted list that ``seq`` waits in."""

    def _same_class(self, a: Sequence, b: Sequence) -> bool:
        return True

    def _put(self, seq: Sequence) -> None:
        insort(self._queue(seq), seq, key=by_rank)
        self._num_waiting += 1


class FcfsPolicy(QueuePolicy):
    """First come, first served."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Sequence] = []

    def candidates(self) -> Iterator[Sequence]:
        yield from self._waiting[:LOOKAHEAD]

    def clear(self) -> None:
        super().clear()
        self._waiting.clear()

    def _queue(self, seq: Sequence) -> list[Sequence]:
        return self._waiting


class PriorityPolicy(FcfsPolicy):
    """Lower ``Request.priority`` first, but ``aging_s`` seconds of waiting count as one level.

    All waiting requests age alike, so their order never changes while they wait: it is that of
    ``arrival_s + priority * aging_s``. Hence the bound: a request of priority p is overtaken by one of priority q < p
    only if that one arrives less than ``(p - q) * aging_s`` seconds later.
    """

    def __init__(self, aging_s: float) -> None:
        super().__init__()
        self._aging_s = aging_s

    def _order(self, seq: Sequence) -> float:
        return seq.request.arrival_s + seq.request.priority * self._aging_s

    def _same_class(self, a: Sequence, b: Sequence) -> bool:
        return a.request.priority == b.request.priority


class _Client:
    """One client's queue and credit."""

    __slots__ = ("deficit", "live", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Sequence] = []
        self.deficit = 0  # tokens it may still run before the others get their turn; negative: it is ahead
        self.live = 0


class FairPolicy(QueuePolicy):
    """Deficit round robin over ``Request.client`` (Shreedhar, Varghese 1995), counted in tokens run.

    A request is charged when it is admitted: its prompt, less what the cache gave, and as many output tokens as
    requests had lately; what it really draws settles that. Recomputing after a preemption is free. So a client may
    overdraw, and then waits until as many rounds have passed as its debt holds quanta. While two clients have requests
    waiting, what they were given differs by no more than one quantum and what one of them has running. An idle client
    keeps neither credit nor debt.
    """

    def __init__(self, quantum: int) -> None:
        """quantum: tokens per client and round; small ones interleave finely."""
        super().__init__()
        self._quantum = quantum
        self._clients: dict[str, _Client] = {}
        self._ring: deque[str] = deque()  # the first one's turn
        self._expected_output = 0.0  # tokens, of recent requests

    def add(self, seq: Sequence) -> None:
        name = seq.request.client
        if name not in self._clients:
            self._clients[name] = _Client()
            self._ring.append(name)
        self._clients[name].live += 1
        super().add(seq)

    def clear(self) -> None:
        super().clear()
        self._clients.clear()
        self._ring.clear()

    def ended(self, seq: Sequence) -> None:
        name = seq.request.client
        client = self._clients[name]
        client.deficit += seq.prepaid
        if seq.cached_tokens is not None:  # it did run
            self._expected_output += 0.1 * (seq.num_output - self._expected_output)
        client.live -= 1
        if client.live == 0:
            del self._clients[name]
            self._ring.remove(name)

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        seq.prepaid = min(round(self._expected_output), seq.request.max_tokens)
        self._clients[seq.request.client].deficit -= num_tokens + seq.prepaid

    def drew(self, seq: Sequence) -> None:
        if seq.prepaid:
            seq.prepaid -= 1
        else:
            self._clients[seq.request.client].deficit -= 1

    def victim(self, running: list[Sequence]) -> Sequence:
        """The newest of the client that is furthest ahead."""
        return min(reversed(running[1:]), key=lambda seq: self._clients[seq.request.client].deficit)

    def candidates(self) -> Iterator[Sequence]:
        positions = {name: 0 for name, client in self._clients.items() if client.waiting}
        for _ in range(LOOKAHEAD):
            if not positions:
                return
            name = self._turn(positions)
            queue, at = self._clients[name].waiting, positions[name]
            seq = queue[at]
            yield seq
            if at < len(queue) and queue[at] is seq:  # passed over
                positions[name] += 1
            if positions[name] == len(queue):
                del positions[name]

    def _turn(self, eligible: dict[str, int]) -> str:
        """The next of the ``eligible`` clients in the ring that has credit."""
        while True:
            for _ in range(len(self._ring)):
                name = self._ring[0]
                if name in eligible and self._clients[name].deficit > 0:
                    return name
                self._ring.rotate(-1)
            # nobody has: as many rounds as the least indebted needs
            rounds = 1 + -max(self._clients[name].deficit for name in eligible) // self._quantum
            for client in self._clients.values():
                most = self._quantum if client.waiting else 0  # credit is not banked
                client.deficit = min(client.deficit + rounds * self._quantum, most)

    def _queue(self, seq: Sequence) -> list[Sequence]:
        return self._clients[seq.request.client].waiting


def make_policy(name: Policy, *, aging_s: float, quantum: int) -> QueuePolicy:
    """The policy of that name. aging_s concerns "priority", quantum (tokens) "fair"."""
    if name == "priority":
        return PriorityPolicy(aging_s)
    return FairPolicy(quantum) if name == "fair" else FcfsPolicy()
