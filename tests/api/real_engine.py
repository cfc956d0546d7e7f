"""The application around the real engine with a tiny random model, on the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import httpx

from octavo.api import create_app
from octavo.core.config import EngineConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine

Talk = Callable[[httpx.AsyncClient, AsyncEngine], Awaitable[None]]


def talk_to(path: Path, talk: Talk, *, server: Mapping[str, Any] | None = None, **wish: Any) -> None:
    """Serve the model at ``path`` while ``talk`` talks to it. server: fields of ServerConfig; wish: of EngineConfig."""

    async def run() -> None:
        engine = AsyncEngine(EngineConfig(model=str(path), **{"max_model_len": 128, "max_num_seqs": 8, **wish}))
        await engine.start()
        try:
            transport = httpx.ASGITransport(create_app(engine, ServerConfig(**(server or {}))))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                await talk(http, engine)
        finally:
            await engine.stop()

    asyncio.run(run())
