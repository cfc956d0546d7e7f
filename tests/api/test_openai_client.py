"""The official client, unchanged, against a server on a loopback port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from live_server import LiveServer
from wire import ANSWER, HELLO


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, seed=1, user="me")  # type: ignore[call-overload]
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_streams_interleave_choices(client: openai.OpenAI) -> None:
    texts, reasons = ["", "", ""], {}
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, n=3, stream=True, stream_options={"include_usage": True}
    )  # type: ignore[call-overload]
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [ANSWER, ANSWER.replace("0", "1"), ANSWER.replace("0", "2")]
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert chunk.usage.completion_tokens == 3 * (len(ANSWER.encode()) + 1)


def test_the_streaming_helper_builds_the_same_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HELLO) as stream:  # type: ignore[arg-type]
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == ANSWER


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=3)  # type: ignore[call-overload]
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries if entry.bytes is not None).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_completions_with_echo_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt=["ab", "c"], echo=True, logprobs=2, max_tokens=1)
    assert [choice.text for choice in answer.choices] == ["abG", "cG"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]


def test_completions_stream(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="fake", prompt="x", stream=True, extra_body={"top_k": 3, "min_p": 0.1})
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER[:-1]  # 16 tokens


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"


def test_errors_become_the_clients_own_exceptions(client: openai.OpenAI, server: LiveServer) -> None:
    def refuse(kind: type[openai.APIStatusError], **fields: Any) -> Any:
        with pytest.raises(kind) as caught:
            client.chat.completions.create(**{"model": "fake", "messages": HELLO, **fields})
        return caught.value

    assert refuse(openai.BadRequestError, temperature=-1).param == "temperature"
    assert refuse(openai.BadRequestError, max_tokens=4096).code == "context_length_exceeded"
    assert "tools" in refuse(openai.BadRequestError, tools=[{"type": "function", "function": {"name": "f"}}]).message
    assert refuse(openai.NotFoundError, model="gpt-9").code == "model_not_found"
    server.engine.queue_full = True
    assert refuse(openai.RateLimitError).response.headers["retry-after"] == "3"


def test_a_stream_that_fails_raises_in_the_client(client: openai.OpenAI, server: LiveServer) -> None:
    server.engine.fail_after = 2
    stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)  # type: ignore[call-overload]
    with pytest.raises(openai.APIError, match="not finite"):
        list(stream)


def test_a_wrong_key_is_an_authentication_error(start_server: Callable[..., Any]) -> None:
    with start_server(api_key=("right",)) as server:
        server.wait_until_ready()
        for key, works in (("wrong", False), ("right", True)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if works:
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


def test_64_streams_at_once_each_get_their_own_answer(server: LiveServer) -> None:
    server.engine.answer = lambda request: bytes(request.prompt_token_ids).decode() * 3

    async def ask(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(model="fake", prompt=prompt, stream=True, max_tokens=100)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def ask_all(prompts: list[str]) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    prompts = [f"<{number}>" for number in range(64)]
    assert asyncio.run(ask_all(prompts)) == [prompt * 3 for prompt in prompts]
