"""Errors on the wire: the one place that maps ``core.errors`` to HTTP.

Every error, whoever raised it, has OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``. The SDK retries
408, 409, 429 and 5xx, so only failures that may pass have these.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.core.errors import (
    EngineUnavailable,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    PromptTooLong,
    QueueFull,
    ReaderTooSlow,
    RequestFailed,
)

logger = logging.getLogger(__name__)

#: A client that is still sending is read and discarded for so long, so that it gets to see the answer.
LINGER_S = 2.0
LINGER_BYTES = 32 * 1024 * 1024


class ApiError(OctavoError):
    """An error that only HTTP knows: wrong key, media type, body size. Carries its whole wire form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.headers = dict(headers or {})


def describe(error: Exception) -> ApiError:
    """The wire form of any error. Unknown ones say nothing of what went wrong inside."""
    if isinstance(error, ApiError):
        return error
    message = str(error)
    if isinstance(error, InvalidRequest):
        if isinstance(error, PromptTooLong) and "maximum context length" not in message:
            message = f"maximum context length exceeded: {message}"  # clients look for these words
        return ApiError(400, message, code=error.code, param=error.param)
    if isinstance(error, ModelNotFound):
        return ApiError(404, message, code="model_not_found", param="model")
    if isinstance(error, QueueFull):
        retry = {"retry-after": _seconds(error.retry_after_s)}
        return ApiError(429, message, code="queue_full", kind="rate_limit_error", headers=retry)
    if isinstance(error, EngineUnavailable):
        retry = {"retry-after": _seconds(error.retry_after_s)}
        return ApiError(503, message, code="engine_unavailable", kind="server_error", headers=retry)
    if isinstance(error, ReaderTooSlow):
        return ApiError(408, message, code="reader_too_slow")
    if isinstance(error, RequestFailed):
        return ApiError(500, message, code="request_failed", kind="server_error")
    return ApiError(500, "internal error; the server's log has the details", code="internal_error", kind="server_error")


def error_json(error: Exception) -> str:
    """``{"error": {...}}`` as text, for a response body or an event of a stream."""
    wire = describe(error)
    body = {"message": str(wire), "type": wire.kind, "param": wire.param, "code": wire.code}
    return json.dumps({"error": body}, separators=(",", ":"))


def error_response(error: Exception, request_id: str | None = None) -> Response:
    """The HTTP answer for an error."""
    wire = describe(error)
    headers = dict(wire.headers)
    if request_id is not None:
        headers["x-request-id"] = request_id
    kind = LingeringResponse if headers.get("connection") == "close" else Response
    return kind(error_json(wire), status_code=wire.status, headers=headers, media_type="application/json")


class LingeringResponse(Response):
    """Answers a request whose body is not wanted, then discards some of that body before the connection closes.

    Closing at once would reset the connection under a client that is still sending, and it would never see why.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of the answer, discard, then end it."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        # Who waits for "100 Continue" has not sent anything, and asking for more would invite it.
        if not any(name == b"expect" for name, _ in scope["headers"]):
            await self._discard(receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _discard(self, receive: Receive) -> None:
        discarded = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while discarded < LINGER_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    discarded += len(message["body"])
        except TimeoutError:
            logger.debug("a client kept sending a refused body for %s s", LINGER_S)


def install(app: FastAPI) -> None:
    """Route every exception that a handler may raise through ``describe``."""
    app.add_exception_handler(OctavoError, _octavo_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _bug)


async def _octavo_error(request: Request, error: Exception) -> Response:
    return error_response(error, _request_id(request))


async def _bug(request: Request, error: Exception) -> Response:
    """ServerErrorMiddleware raises it again once this is sent; uvicorn then logs it and closes the connection.

    So the client must be told, or it would send its next request into a connection that is about to close.
    """
    response = error_response(error, _request_id(request))
    response.headers["connection"] = "close"
    return response


async def _http_exception(request: Request, error: Exception) -> Response:
    """No such route, or not with this method: raised by the router."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        wire = ApiError(404, f"there is no route {where}; see /docs", code="not_found", headers=headers)
    elif error.status_code == 405:
        allow = headers.get("Allow", headers.get("allow", "another method"))
        wire = ApiError(405, f"{where} is not allowed; use {allow}", code="method_not_allowed", headers=headers)
    else:
        wire = ApiError(error.status_code, str(error.detail), headers=headers)
    return error_response(wire, _request_id(request))


async def _validation_error(request: Request, error: Exception) -> Response:
    """FastAPI's own 422, for path and query parameters."""
    assert isinstance(error, RequestValidationError)
    first: Mapping[str, Any] = error.errors()[0]
    param = str(first["loc"][-1])
    return error_response(ApiError(400, f"{param}: {first['msg']}", param=param), _request_id(request))


async def _client_gone(request: Request, error: Exception) -> Response:
    """The client left while its body was being read; nobody will see this answer."""
    return error_response(ApiError(400, "the client disconnected"), _request_id(request))


def _request_id(request: Request) -> str | None:
    found = request.scope.get("state", {}).get("request_id")
    return found if isinstance(found, str) else None


def _seconds(duration_s: float) -> str:
    """``Retry-After`` takes whole seconds; 0 would mean "at once"."""
    return str(max(1, math.ceil(duration_s)))
