"""``GET /health``: whether new requests are taken."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from octavo.api.service import service_of

router = APIRouter(tags=["server"])


@router.get("/health", summary="Is the server ready?")
@router.head("/health", include_in_schema=False)  # what some load balancers send
async def health(request: Request) -> dict[str, Any]:
    """200 when ready; 503 with ``Retry-After`` while the model loads, the server drains, or the engine is dead."""
    service = service_of(request)
    service.check_ready()
    return {"status": "ready"}
