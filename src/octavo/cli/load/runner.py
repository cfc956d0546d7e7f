"""Sends a workload and keeps what came back, and watches what that costs the client itself."""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.cli.load.sample import Sample
from octavo.cli.load.server import Server
from octavo.cli.load.workload import PlannedRequest

#: How often the loop's lag is looked at, and how often progress is shown.
_LAG_PERIOD_S, _PROGRESS_PERIOD_S = 0.02, 0.5
#: Failures in a row after which a chat without end gives up.
_PATIENCE = 3


@dataclass(slots=True)
class ClientCost:
    """What the client took. lag_s: how late the event loop ran a timer, every 20 ms."""

    cpu_s: float = 0.0
    lag_s: list[float] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Run:
    """What a run left. ``samples`` in the order in which they ended; those in flight at Ctrl-C are "interrupted"."""

    samples: list[Sample] = field(default_factory=list)
    duration_s: float = 0.0
    cost: ClientCost = field(default_factory=ClientCost)
    was_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """Long prompts that arrive amid steady chats."""

    requests: Sequence[PlannedRequest]
    every_s: float


class RunClock:
    """Seconds since the run began."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._zero = time.perf_counter()

    def __call__(self) -> float:
        return time.perf_counter() - self._zero


class Runner:
    """One run against a server. ``clock`` must be the server's, and counts from the run's start."""

    def __init__(self, server: Server, clock: RunClock, on_progress: Callable[[Run], None] = lambda run: None) -> None:
        self._server = server
        self._clock = clock
        self._on_progress = on_progress
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[object]] = set()
        self.run = Run()

    async def closed(self, requests: Iterator[PlannedRequest], concurrency: int) -> Run:
        """``concurrency`` clients, each of which asks again once it has its answer, until ``requests`` ends."""
        with self._measured():
            await self._finish([self._start(self._client(requests)) for _ in range(concurrency)])
        return self.run

    async def open(self, requests: Sequence[PlannedRequest], times_s: Sequence[float]) -> Run:
        """Each request at its time, however many are unanswered."""
        bodies = [self._server.body(planned) for planned in requests]
        with self._measured():
            for planned, body, due_s in zip(requests, bodies, times_s, strict=True):
                if await self._is_stopped_by(due_s):
                    break
                self._start(self._one(planned, body, due_s))
            await self._finish(list(self._tasks))
        return self.run

    async def interfered(self, chats: Iterator[PlannedRequest], concurrency: int, long: Interference) -> Run:
        """Chats as in ``closed``, without end, until the last long prompt is answered."""
        is_over = False
        endless = itertools.takewhile(lambda _: not is_over, chats)
        bodies = [self._server.body(planned) for planned in long.requests]
        with self._measured():
            clients = [self._start(self._client(endless, patience=_PATIENCE)) for _ in range(concurrency)]
            asked = []
            for number, (planned, body) in enumerate(zip(long.requests, bodies, strict=True), 1):
                if await self._is_stopped_by(due_s := number * long.every_s):
                    break
                asked.append(self._start(self._one(planned, body, due_s)))
            await self._finish(asked)
            is_over = True
            await self._finish(clients)
        return self.run

    def stop(self) -> None:
        """Ask no more, and let go of what is in flight."""
        self.run.was_interrupted = True
        self._stop.set()
        for task in self._tasks:
            task.cancel()

    async def _client(self, requests: Iterator[PlannedRequest], patience: int | None = None) -> None:
        """patience: failures in a row after which it gives up, where ``requests`` would never end."""
        failed = 0
        while not self._stop.is_set() and failed != patience and (planned := next(requests, None)) is not None:
            body = self._server.body(planned)
            sample = await self._one(planned, body, self._clock())
            failed = 0 if sample.failure is None else failed + 1

    async def _one(self, planned: PlannedRequest, body: bytes, arrival_s: float) -> Sample:
        sample = await self._server.ask(planned, body, arrival_s)
        self.run.samples.append(sample)
        return sample

    async def _is_stopped_by(self, due_s: float) -> bool:
        """Wait until then, or until Ctrl-C."""
        if (wait_s := due_s - self._clock()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), wait_s)
        return self._stop.is_set()

    def _start(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _finish(self, tasks: Sequence[asyncio.Task[object]]) -> None:
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            # a task that Ctrl-C met before its first line never caught the cancellation
            if isinstance(done, BaseException) and not isinstance(done, asyncio.CancelledError):
                raise done

    @contextmanager
    def _measured(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        watchers = [loop.create_task(self._watch_lag()), loop.create_task(self._show_progress())]
        loop.add_signal_handler(signal.SIGINT, self.stop)
        gc.collect()
        gc.freeze()  # what is here now is not looked through again while requests run
        self._clock.restart()
        cpu_s = time.process_time()
        try:
            yield
        finally:
            self.run.duration_s = self._clock()
            self.run.cost.cpu_s = time.process_time() - cpu_s
            gc.unfreeze()
            loop.remove_signal_handler(signal.SIGINT)
            for watcher in watchers:
                watcher.cancel()

    async def _watch_lag(self) -> None:
        while True:
            due_s = time.perf_counter() + _LAG_PERIOD_S
            await asyncio.sleep(_LAG_PERIOD_S)
            self.run.cost.lag_s.append(max(0.0, time.perf_counter() - due_s))

    async def _show_progress(self) -> None:
        while True:
            self._on_progress(self.run)
            await asyncio.sleep(_PROGRESS_PERIOD_S)
