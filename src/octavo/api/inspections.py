"""Answers about the engine: taken on its thread in microseconds, made and written on a worker thread."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.responses import Response

#: Equal questions within this time get one answer, so that asking cannot take more of the machine than this often.
SHARED_S = 1.0


class SharedAnswers:
    """The latest answer to each of a few questions."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[float, asyncio.Task[Response]]] = {}

    async def get(self, question: str, make: Callable[[], Awaitable[Response]]) -> Response:
        """The answer, at most ``SHARED_S`` old; who asks while it is being made waits for the same."""
        now = asyncio.get_running_loop().time()
        made_s, task = self._answers.get(question, (0.0, None))
        failed = task is not None and task.done() and (task.cancelled() or task.exception() is not None)
        if task is None or failed or (task.done() and now - made_s > SHARED_S):
            task = asyncio.ensure_future(_result(make))
            self._answers[question] = now, task
        answer = await asyncio.shield(task)  # one who leaves does not take it from the others
        return Response(answer.body, media_type=answer.media_type)


async def _result(make: Callable[[], Awaitable[Response]]) -> Response:
    return await make()


async def json_answer(make: Callable[[], dict[str, Any]]) -> Response:
    """What ``make`` returns, as JSON; both on a worker thread."""
    body = await asyncio.to_thread(lambda: _write(make()).encode())
    return Response(body, media_type="application/json")


def _write(value: dict[str, Any]) -> str:
    """One item of a list at a time: the encoder holds the GIL from beginning to end of what it is given."""
    parts = []
    for name, field in value.items():
        text = f"[{','.join(map(_dumps, field))}]" if isinstance(field, list) else _dumps(field)
        parts.append(f"{_dumps(name)}:{text}")
    return f"{{{','.join(parts)}}}"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
