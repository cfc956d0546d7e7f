"""Request bodies: bounded in size and time, and strict JSON.

Python's parser is generous: NaN, 1e999, duplicate keys (last wins) and lone surrogates pass. Each of these would either
change what the caller meant or fail somewhere inside, so each is a 400 here.

Small bodies, which are nearly all, are read at once; the others in pieces, on the text workers.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from octavo.api.error_handlers import ApiError
from octavo.api.json_steps import JsonReader, discard
from octavo.api.sse import until_disconnect
from octavo.core.errors import InvalidRequest
from octavo.core.limits import BODY_TIMEOUT_S, MAX_BODY_BYTES, MAX_JSON_DEPTH, MAX_NUMBER_CHARS
from octavo.core.steps import Steps
from octavo.text.workers import TextWorkers

T = TypeVar("T")

#: A body within these takes under a millisecond to parse, most of it if it consists of objects or of numbers.
SMALL_BODY_BYTES = 1 << 16
SMALL_BODY_CONTAINERS = MAX_JSON_DEPTH
SMALL_BODY_ITEMS = 1 << 12

_HALF_PAIR = "the body has a \\u escape that is half of a surrogate pair"
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


async def read_fields(request: Request, workers: TextWorkers, client: str, read: Callable[[dict[str, Any]], T]) -> T:
    """What ``read`` makes of the request's JSON object. Raises ApiError (408, 413, 415), InvalidRequest, or its errors.

    client: whose share of ``workers`` a large body takes. ClientDisconnect if its client leaves meanwhile.
    """
    _check_media_type(request)
    body = await read_body(request)
    if is_small(body):
        return read(parse_json(body))
    reading = workers.run(_read_in_steps(body, read), client=client, size=len(body))
    return await until_disconnect(request.receive, lambda: None, reading)


def _read_in_steps(body: bytes, read: Callable[[dict[str, Any]], T]) -> Steps[T]:
    value = yield from parse_json_steps(body)
    try:
        return read(value)
    finally:
        yield from discard(value)


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
    """The OpenAPI part that documents a body which ``read_fields`` reads."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def is_small(body: bytes) -> bool:
    """Whether ``parse_json`` takes under a millisecond for it, and nests no deeper than it may."""
    return (
        len(body) <= SMALL_BODY_BYTES
        and body.count(b"{") + body.count(b"[") <= SMALL_BODY_CONTAINERS
        and body.count(b",") + body.count(b":") <= SMALL_BODY_ITEMS
    )


def parse_json(body: bytes) -> dict[str, Any]:
    """A small ``body`` as a JSON object in which every number is finite and every string is valid Unicode."""
    body = body.removeprefix(codecs.BOM_UTF8)
    try:
        value = json.loads(
            body.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite
        )
        if _SURROGATE_ESCAPE.search(body):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # fails on a surrogate without its partner
    except UnicodeEncodeError as error:
        raise InvalidRequest(_HALF_PAIR) from error
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _refused(error) from error
    return _object(value)


def parse_json_steps(body: bytes) -> Steps[dict[str, Any]]:
    """``parse_json`` for a body of any size: the same values and errors, and the limits on how much there may be."""
    body = body.removeprefix(codecs.BOM_UTF8)
    reader = JsonReader(body, number=_finite, constant=_no_constant, twice=_twice)
    try:
        value = yield from reader.read()
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise _refused(error) from error
    if reader.has_half_pair:
        raise InvalidRequest(_HALF_PAIR)
    return _object(value)


def _refused(error: UnicodeDecodeError | RecursionError | ValueError) -> InvalidRequest:
    if isinstance(error, UnicodeDecodeError):
        return InvalidRequest(f"the body is not UTF-8: bad byte at offset {error.start}")
    if isinstance(error, RecursionError):
        return InvalidRequest(f"the body is nested too deeply: more than {MAX_JSON_DEPTH} levels")
    return InvalidRequest("the body has a number with too many digits")  # the interpreter's limit


def _object(value: object) -> dict[str, Any]:
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
                _twice(key)
            seen.add(key)
    return found


def _twice(key: str) -> NoReturn:
    raise InvalidRequest(f"the body has the key {key[:80]!r} twice in one object", param=key[:80])


def _no_constant(name: str) -> float:
    raise InvalidRequest(f"the body has {name}, which is not JSON")


def _finite(digits: str) -> float:
    if len(digits) > MAX_NUMBER_CHARS + digits.startswith("-"):
        raise ValueError("too many digits")
    value = float(digits)
    if not math.isfinite(value):
        raise InvalidRequest(f"the body has the number {digits[:40]}, which is too large")
    return value


def _json_name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
