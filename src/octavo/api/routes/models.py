"""``GET /v1/models``: the one model that is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from octavo.api.service import Service, service_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", summary="List the models")
async def list_models(request: Request) -> dict[str, Any]:
    """The served model, with the longest sequence it takes."""
    return {"object": "list", "data": [_describe(service_of(request))]}


@router.get("/v1/models/{model_id:path}", summary="Describe a model")
async def retrieve_model(request: Request, model_id: str) -> dict[str, Any]:
    """One model; 404 if it is not the served one."""
    service = service_of(request)
    service.check_model(model_id)
    return _describe(service)


def _describe(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "max_model_len": service.engine.config.max_model_len,
    }
