"""Reading what the server wrote, strictly."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "Grüße, 世界 0"  # of the fake engine's first choice


def chat(http: httpx.Client, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": HELLO, **fields})


def complete(http: httpx.Client, prompt: Any = "hello", **fields: Any) -> httpx.Response:
    return http.post(COMPLETIONS, json={"prompt": prompt, **fields})


def answer_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking that it has exactly OpenAI's four fields."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["message"]
    return dict(body["error"])


def events_of(response: httpx.Response) -> list[Any]:
    """The events' JSON, after checking the framing and the final [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events.pop() == ""
    events = [event for event in events if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]
