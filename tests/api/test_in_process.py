"""The application without a server: through ASGI, on the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
from fake_engine import FakeEngine
from wire import ANSWER, CHAT, COMPLETIONS, HELLO, answer_of, error_of, events_of

from octavo.api import create_app
from octavo.api.field_policy import NO_OPS, UNSUPPORTED
from octavo.api.generation import merge
from octavo.core.config import ServerConfig
from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import SampledToken


def in_process(talk: Callable[[httpx.AsyncClient, FakeEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        engine = FakeEngine()
        await engine.start()
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            await talk(http, engine)
        assert engine.streams == set()

    asyncio.run(run())


def test_both_endpoints_answer_whole_and_streamed() -> None:
    async def talk(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        whole = answer_of(await http.post(CHAT, json={"messages": HELLO}))
        assert whole["choices"][0]["message"]["content"] == ANSWER
        events = events_of(await http.post(COMPLETIONS, json={"prompt": "x", "stream": True, "max_tokens": 99}))
        assert "".join(event["choices"][0]["text"] for event in events) == ANSWER
        assert engine.aborted == []

    in_process(talk)


def test_errors_before_and_after_the_first_byte() -> None:
    async def talk(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        error_of(await http.post(CHAT, json={"messages": HELLO, "stream": True, "temperature": -1}), 400)
        engine.fail_after = 0
        events = events_of(await http.post(CHAT, json={"messages": HELLO, "stream": True}))
        assert [event["error"]["code"] for event in events] == ["request_failed"]

    in_process(talk)


def test_the_api_describes_itself_with_every_field_it_accepts_or_refuses() -> None:
    async def talk(http: httpx.AsyncClient, engine: FakeEngine) -> None:
        schema = answer_of(await http.get("/openapi.json"))
        body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {"messages", "temperature", "min_p", "dry_multiplier"} <= set(body["properties"])
        assert all(f"| `{name}` |" in schema["info"]["description"] for name in (*NO_OPS, *UNSUPPORTED))

    in_process(talk)


def test_merged_outputs_are_the_concatenation_of_their_parts() -> None:
    def output(choice: int, text: str, *tokens: int, end: bool = False) -> tuple[int, RequestOutput]:
        return choice, RequestOutput(
            request_id="r",
            choice_index=choice,
            text=text,
            token_ids=tokens,
            logprobs=tuple(SampledToken(token_id=token, logprob=-1.0) for token in tokens),
            finish_reason="stop" if end else None,
            stop_reason="s" if end else None,
            usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0) if end else None,
        )

    parts = [output(0, "a", 1), output(1, "x", 7), output(0, "", 2), output(0, "b", 3, end=True), output(1, "y", 8)]
    assert merge(parts) == [output(0, "ab", 1, 2, 3, end=True), output(1, "xy", 7, 8)]
    assert merge(parts[:1]) == parts[:1]
