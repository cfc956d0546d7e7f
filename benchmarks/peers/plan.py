"""Which cases a round runs, so that a run ends within its budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from contenders import Contender, Pair
from in_process import Bench
from recipes import Peer
from workloads import Workload

Task = Workload | Bench
#: What is guessed before anything is measured: prefill, and decoding of 1, 8, and 32 or more streams, in tokens per
#: second of the 135M model on two cores with AVX-512. A run's first round replaces it.
_GUESSED: Mapping[Peer | str, tuple[float, float, float, float]] = {
    "octavo": (2500, 150, 400, 600),
    "llama.cpp": (400, 60, 110, 140),
    "vllm": (1700, 25, 150, 320),
    "openvino": (900, 50, 180, 320),
    "transformers": (400, 14, 14, 14),  # one request after the other
}
#: Rounds that a budget is spread over: what is too dear for one of them runs in the last.
WANTED_ROUNDS = 3
#: Of a case, beside the requests: the client's start and probes, the server's where it is started each time.
OVERHEAD_S = 2.5
#: Of a server's first start.
START_S: Mapping[Peer | str, float] = {"octavo": 2, "llama.cpp": 2, "vllm": 100, "openvino": 6, "transformers": 15}


@dataclass(frozen=True, slots=True)
class Case:
    """A contender and what it is asked."""

    contender: Contender
    task: Task

    @property
    def is_in_process(self) -> bool:
        return isinstance(self.task, Bench)


def cases_of(contenders: Sequence[Contender], tasks: Sequence[Task]) -> list[Case]:
    """Task by task, so that those that are compared run one soon after the other."""
    return [
        Case(contender, task)
        for task in tasks
        for contender in contenders
        if isinstance(task, Workload) or contender.peer in ("octavo", "llama.cpp")
    ]


def guess_s(case: Case, slowness: float) -> float:
    """Seconds that a case takes. ``slowness``: how many times as long a token takes as with the 135M model."""
    prefill, one, eight, many = _GUESSED[case.contender.peer]

    def decode(streams: int) -> float:
        return one if streams < 4 else eight if streams < 16 else many

    task = case.task
    if isinstance(task, Bench):
        prompts = 1 if case.contender.peer == "llama.cpp" else sum(task.streams)  # it runs a shared one
        decoded = sum(n * task.steps / decode(n) for n in task.streams) + prompts * task.prompt / prefill
        return OVERHEAD_S + slowness * (decoded + 1.5 * sum(task.prefills) / prefill)
    if task.long_prompts:
        waited = slowness * 1.5 * task.long_prompts * task.long_tokens / prefill
        return OVERHEAD_S + task.long_prompts * task.long_every_s + waited + slowness * 512 / decode(task.concurrency)
    prompts = task.shared_prefix + task.requests * task.prompt_tokens
    outputs = task.requests * (task.output_tokens - 1)
    return OVERHEAD_S + slowness * (prompts / prefill + outputs / decode(task.concurrency))


@dataclass(slots=True)
class Budget:
    """Chooses the cases of each round. ``seconds_of``: what each case takes, guessed first, measured later."""

    cases: Sequence[Case]
    pairs: Sequence[Pair]
    seconds_of: dict[Case, float]
    runs_of: dict[Case, int] = field(default_factory=dict)
    rounds: int = 0

    def next_round(self, left_s: float, max_rounds: int) -> list[Case]:
        """Those that fit, those that ran least often and are cheapest first; [] ends the run.

        octavo runs where a peer does that it is compared with. Before the last of the wanted rounds a round gets its
        share of what is left, so that a few dear cases do not leave the others with one round and no interval.

        They are in the order in which they are to run: in every other round, the contenders of a task turn round.
        """
        if self.rounds >= max_rounds:
            return []
        shares = max(1, min(WANTED_ROUNDS, max_rounds) - self.rounds)
        chosen = self._chosen(left_s / shares) or self._chosen(left_s)
        if chosen:
            self.rounds += 1
        for case in chosen:
            self.runs_of[case] = self.runs_of.get(case, 0) + 1
        return self._ordered(chosen)

    def _chosen(self, left_s: float) -> set[Case]:
        chosen: set[Case] = set()
        peers = [case for case in self.cases if case.contender.peer != "octavo"]
        for case in sorted(peers, key=lambda case: (self.runs_of.get(case, 0), self.seconds_of[case])):
            wanted = {case, *self._partners(case)} - chosen
            cost = sum(self.seconds_of[one] for one in wanted)
            if cost <= left_s:
                chosen |= wanted
                left_s -= cost
        return chosen

    def drop(self, contender: Contender) -> None:
        """A contender that cannot be started."""
        self.cases = [case for case in self.cases if case.contender != contender]

    def _partners(self, case: Case) -> set[Case]:
        """What a peer's case is compared with, without which it would say nothing."""
        partners = {Case(pair.ours, case.task) for pair in self.pairs if pair.theirs == case.contender}
        return partners & set(self.cases)

    def _ordered(self, chosen: set[Case]) -> list[Case]:
        ordered = [case for case in self.cases if case in chosen]
        if self.rounds % 2:
            return ordered
        tasks = list(dict.fromkeys(case.task for case in ordered))
        return [case for task in tasks for case in reversed(ordered) if case.task is task]
