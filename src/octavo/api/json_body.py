"""Request bodies: bounded in size and time, and strict JSON.

Python's parser is generous: NaN, 1e999, duplicate keys (last wins) and lone surrogates pass. Each of these would either
change what the caller meant or fail somewhere inside, so each is a 400 here.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request

from octavo.api.error_handlers import ApiError
from octavo.core.errors import InvalidRequest
from octavo.core.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_json(request: Request) -> dict[str, Any]:
    """The request's JSON object. Raises ApiError (408, 413, 415) or InvalidRequest."""
    _check_media_type(request)
    return parse_json(await read_body(request))


async def read_body(request: Request) -> bytes:
    """The body, at most ``MAX_BODY_BYTES`` and ``BODY_TIMEOUT_S``; reading stops where it exceeds either."""
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise _too_large()
                parts.append(part)
    except TimeoutError as error:
        message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        raise ApiError(408, message, code="request_timeout") from error
    return b"".join(parts)


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI part that documents a body which ``read_json`` reads."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def parse_json(body: bytes) -> dict[str, Any]:
    """``body`` as a JSON object in which every number is finite and every string is valid Unicode."""
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on a surrogate without its partner
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8: bad byte at offset {error.start}") from error
    except UnicodeEncodeError as error:
        raise InvalidRequest("the body has a \\u escape that is half of a surrogate pair") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:  # the interpreter's limit on digits of an int
        raise InvalidRequest("the body has a number with too many digits") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_json_name(value)}")
    return value


def _check_media_type(request: Request) -> None:
    """Require JSON: a browser sends it across origins only after asking, so a web page cannot drive a local server."""
    given = request.headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"Content-Type is {given[:80]!r} but must be application/json (curl: -H 'Content-Type: application/json')",
            code="unsupported_media_type",
        )


def _too_large() -> ApiError:
    return ApiError(
        413,
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code="request_too_large",
        headers={"connection": "close"},
    )


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise InvalidRequest(f"the body has the key {key[:80]!r} twice in one object", param=key[:80])
            seen.add(key)
    return found


def _no_constant(name: str) -> float:
    raise InvalidRequest(f"the body has {name}, which is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest(f"the body has the number {digits[:40]}, which is too large")
    return value


def _json_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
