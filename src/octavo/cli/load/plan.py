"""A whole run: what, when, how often; a pure function of its fields and of the server's way of being asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from octavo.cli.distributions import Lengths
from octavo.cli.load.arrivals import Arrivals
from octavo.cli.load.runner import Interference, Run, RunClock, Runner
from octavo.cli.load.server import Server
from octavo.cli.load.trace import TraceEntry
from octavo.cli.load.workload import Asker, PlannedRequest, Workload, from_trace

#: A long prompt is there to disturb; its answer is of no interest.
_LONG_OUTPUT = Lengths(1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the command line asked for. ``trace`` or ``long_prompt`` may replace the plain workload, never both."""

    workload: Workload
    arrivals: Arrivals
    num_requests: int
    warmup: int = 1
    seed: int = 0
    trace: Sequence[TraceEntry] = ()
    speed: float = 1.0
    long_prompt: Lengths | None = None
    num_long: int = 0
    long_every_s: float = 0.0

    @property
    def shares_prompts(self) -> bool:
        """Whether a server's prefix cache may find anything."""
        return self.workload.shared_prefix > 0 or len(self.trace) > 0

    def requests(self, asker: Asker) -> Iterator[PlannedRequest]:
        """In order of arrival. Chats that long prompts disturb go on without end."""
        if self.trace:
            fixed = self.workload.has_fixed_length
            for index, entry in enumerate(self.trace[: self.num_requests]):
                yield from_trace(entry, index, asker, has_fixed_length=fixed)
            return
        group = "" if self.long_prompt is None else "chat"
        for index in itertools.count() if group else range(self.num_requests):
            yield self.workload.request(index, asker, group)

    def long_requests(self, asker: Asker) -> list[PlannedRequest]:
        """Those that disturb."""
        assert self.long_prompt is not None
        workload = Workload(prompt_tokens=self.long_prompt, output_tokens=_LONG_OUTPUT)
        return [workload.request(index, asker, "long") for index in range(self.num_long)]

    def times_s(self) -> list[float]:
        """When each arrives. Not for a fixed number of clients."""
        if self.trace:
            return [entry.arrival_s / self.speed for entry in self.trace[: self.num_requests]]
        return list(itertools.islice(self.arrivals.times_s(self.seed), self.num_requests))

    def __str__(self) -> str:
        if self.trace:
            number = min(self.num_requests, len(self.trace))
            return f"{number} requests of a trace, {self.speed:g} x its speed, seed {self.seed}"
        load = self.workload
        prefix = f" behind {load.shared_prefix} shared ({load.prefix_groups} kinds)" if load.shared_prefix else ""
        lengths = f"{load.prompt_tokens} + {load.output_tokens} tokens{prefix}"
        if self.long_prompt is not None:
            return (
                f"{self.num_long} prompts of {self.long_prompt} tokens, one every {self.long_every_s:g} s, amid "
                f"{self.arrivals.concurrency} chats of {lengths}, seed {self.seed}"
            )
        return f"{self.num_requests} requests of {lengths}, {self.arrivals}, seed {self.seed}"


async def execute(plan: Plan, server: Server, clock: RunClock, on_progress: Callable[[Run], None]) -> Run:
    """Warm up, then run."""
    for index in range(plan.warmup):
        planned = plan.workload.request(index, server.asker, "warm-up")
        await server.ask(planned, server.body(planned), clock())
    runner = Runner(server, clock, on_progress)
    requests = plan.requests(server.asker)
    if plan.long_prompt is not None:
        assert plan.arrivals.concurrency is not None
        long = Interference(requests=plan.long_requests(server.asker), every_s=plan.long_every_s)
        return await runner.interfered(requests, plan.arrivals.concurrency, long)
    if plan.arrivals.concurrency is not None:
        return await runner.closed(requests, plan.arrivals.concurrency)
    return await runner.open(list(requests), plan.times_s())
