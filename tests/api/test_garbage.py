"""What requests leave for the garbage collector, and when it runs."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asgi import post_scope
from octavo.api import create_app
from octavo.api.garbage import FULL_COLLECTION, QUIET_TICKS, QuietCollector, collect_seldom
from octavo.core.config import EngineConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine


@pytest.fixture
def collector_as_it_was() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    gc.enable()


async def ask(app: Any, path: str, body: bytes, *, leave_after: int | None = None) -> None:
    """One POST. leave_after: messages of the answer until the client leaves."""
    left = asyncio.Event()
    num_sent = 0
    if leave_after == 0:
        asyncio.get_running_loop().call_later(0.01, left.set)
    received = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(received, None)
        if message is None:
            await left.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(_: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent == leave_after:
            left.set()
            await asyncio.sleep(0)

    await app(post_scope(path), receive, send)


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
CASES: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "completion": (COMPLETIONS, {"prompt": "ab"}, None),
    "several prompts and choices": (COMPLETIONS, {"prompt": ["ab", "c"], "n": 3}, None),
    "echo": (COMPLETIONS, {"prompt": "ab", "echo": True, "logprobs": 2}, None),
    "stream": (COMPLETIONS, {"prompt": "ab", "stream": True, "ignore_eos": True}, None),
    "refused": (COMPLETIONS, {"prompt": "ab", "temperature": -1}, None),
    "too long": (COMPLETIONS, {"prompt": [5] * 100_000}, None),
    "no template": (CHAT, {"messages": HELLO}, None),
    "left while waiting": (COMPLETIONS, {"prompt": "ab", "max_tokens": 100, "ignore_eos": True}, 0),
    "left while streaming": (COMPLETIONS, {"prompt": "ab", "stream": True, "max_tokens": 100, "ignore_eos": True}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_request_leaves_nothing_that_takes_the_garbage_collector(case: str, sentencepiece_path: Path) -> None:
    path, body, leave_after = CASES[case]

    async def talk() -> list[object]:
        engine = AsyncEngine(EngineConfig(model=str(sentencepiece_path), max_model_len=128, max_num_seqs=8))
        await engine.start()
        app = create_app(engine, ServerConfig())
        encoded = json.dumps(body).encode()
        await ask(app, path, encoded, leave_after=leave_after)  # what is made once
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                await ask(app, path, encoded, leave_after=leave_after)
            for _ in range(100):  # the engine thread lets go of what it aborts
                await asyncio.sleep(0.01)
                if engine.is_idle:
                    break
            gc.collect()
            return [item for item in gc.garbage if not isinstance(item, type)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            await engine.stop()

    left = asyncio.run(talk())
    assert left == []


@pytest.mark.usefixtures("collector_as_it_was")
def test_all_that_is_alive_is_collected_when_nobody_has_waited_for_a_while() -> None:
    full = []
    gc.collect()
    collect_seldom()
    assert gc.get_threshold()[2] == FULL_COLLECTION
    collector = QuietCollector()

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(info)

    gc.callbacks.append(noted)
    try:
        for _ in range(3 * QUIET_TICKS):
            collector.tick(is_idle=True)
        assert not full, "nothing has happened"
        collector.tick(is_idle=False)
        gc.collect(1)
        for _ in range(5):
            for _ in range(QUIET_TICKS - 1):
                collector.tick(is_idle=True)
            collector.tick(is_idle=False)
        assert not full, "never quiet for long enough"
        for _ in range(3 * QUIET_TICKS):
            collector.tick(is_idle=True)
        assert len(full) == 1
    finally:
        gc.callbacks.remove(noted)
