"""``GET /v1/stats``: latencies, throughput and cache use over a window. Counts only, so any client may ask."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.inspections import json_answer
from octavo.api.service import service_of
from octavo.core.errors import InvalidRequest

router = APIRouter(tags=["octavo"])

#: Windows by name, in seconds.
WINDOWS = {"1m": 60.0, "5m": 300.0, "15m": 900.0, "1h": 3600.0}


@router.get("/v1/stats", summary="Latency, throughput, cache use")
async def stats(request: Request, window: str = "5m") -> Response:
    """TTFT, TPOT, ITL and step time in seconds (mean, p50, p99), tokens per second, KV use, prefix hit rate.

    At most a second old.
    """
    if window not in WINDOWS:
        raise InvalidRequest(f"window is {window[:40]!r} but must be one of {', '.join(WINDOWS)}", param="window")
    service = service_of(request)
    service.check_ready()

    async def answer() -> Response:
        found = await service.engine.stats()
        return await json_answer(lambda: {"window": window, **found.as_dict(WINDOWS[window])})

    return await service.shared_answers.get(window, answer)
