"""What requests cost: CPU of callbacks of the event loop, pieces of the text workers, and turns of the engine thread.

All in ``time.thread_time``, so that a busy machine changes little. A turn of the engine is counted without the kernels,
which run without the GIL, but with the packing of draws. Collecting garbage falls to whoever happens to run, and stands
apart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from asgi import post_scope
from octavo.core.steps import Steps
from octavo.engine.async_engine import AsyncEngine
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.native.draws import DrawPacker
from octavo.text.workers import TextWorkers

Who = Literal["event loop", "text workers", "engine thread", "worker thread", "garbage"]


@dataclass
class Costs:
    """CPU seconds by who spent them: the longest section that was not interrupted, and all of it."""

    longest_s: dict[str, float] = field(default_factory=dict)
    total_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, who: Who, seconds: float) -> None:
        with self.lock:
            self.longest_s[who] = max(self.longest_s.get(who, 0.0), seconds)
            self.total_s[who] = self.total_s.get(who, 0.0) + seconds


@contextmanager
def counted() -> Iterator[Costs]:
    """Everything that octavo's threads do inside, from the event loop's next callback on."""
    costs = Costs()
    thread = threading.local()
    loop_thread = threading.get_ident()

    def timed(who: Who, call: Callable[..., Any], *, minus: bool = False) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if who == "event loop" and threading.get_ident() != loop_thread:
                return call(*args, **kwargs)
            outer, thread.apart_s = getattr(thread, "apart_s", 0.0), 0.0
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                costs.note(who, time.thread_time() - start - thread.apart_s)
                thread.apart_s = outer

        return wrapper

    def apart(call: Callable[..., Any], sign: float) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                thread.apart_s = getattr(thread, "apart_s", 0.0) + sign * (time.thread_time() - start)

        return wrapper

    def timed_steps(steps: Steps[Any]) -> Steps[Any]:
        step = timed("text workers", lambda: next(steps))
        try:
            while True:
                try:
                    step()
                except StopIteration as end:
                    return end.value
                yield
        finally:
            steps.close()

    def collecting(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            thread.collecting_at = time.thread_time()
            return
        spent = time.thread_time() - getattr(thread, "collecting_at", time.thread_time())
        thread.apart_s = getattr(thread, "apart_s", 0.0) + spent
        costs.note("garbage", spent)

    run = TextWorkers.run

    async def run_timed(self: TextWorkers, steps: Steps[Any], **kwargs: Any) -> Any:
        return await run(self, timed_steps(steps), **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", timed("event loop", asyncio.events.Handle._run))
        patch.setattr(TextWorkers, "run", run_timed)
        patch.setattr(AsyncEngine, "_turn", timed("engine thread", AsyncEngine._turn))
        patch.setattr(NativeBackend, "run", apart(NativeBackend.run, 1.0))
        patch.setattr(DrawPacker, "pack", apart(DrawPacker.pack, -1.0))
        work_item = concurrent.futures.thread._WorkItem  # type: ignore[attr-defined]
        patch.setattr(work_item, "run", timed("worker thread", work_item.run))
        gc.callbacks.append(collecting)
        try:
            yield costs
        finally:
            gc.callbacks.remove(collecting)


async def ask(app: Any, path: str, body: bytes) -> tuple[int, int]:
    """Status and size of the answer to one POST, without a client whose work would count too."""
    sent: list[Mapping[str, Any]] = []
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Mapping[str, Any]:
        message = next(received, None)
        if message is None:
            await asyncio.get_running_loop().create_future()  # the client stays
        assert message is not None
        return message

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            sent.append(message)
        else:
            sizes.append(len(message["body"]))

    sizes: list[int] = []
    await app(post_scope(path), receive, send)
    return sent[0]["status"], sum(sizes)


def encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body).encode()


def settled_bytes() -> int:
    """Python's memory, without garbage."""
    for _ in range(2):
        gc.collect()
    return tracemalloc.get_traced_memory()[0]
