"""Every row of the price list, sent as its costliest admissible request."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from costs import Costs, ask, counted, encoded, settled_bytes

from octavo.api import create_app
from octavo.api.garbage import collect_seldom
from octavo.api.price_list import PRICES, Price, as_markdown
from octavo.api.schemas_chat import ChatRequest
from octavo.api.schemas_completions import CompletionRequest
from octavo.core import limits as most
from octavo.core.config import EngineConfig, ServerConfig
from octavo.engine.async_engine import AsyncEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 4096
MANY = 16
TRIES = 3  # of a measurement that is over its bound
GARBAGE_MS = 25.0  # CPU of one collection
#: What may be left of Python's memory after all have been answered: caches, rings; and of each sequence a trace.
LEFT_BYTES, TRACE_BYTES = 4 << 20, 1200

Body = tuple[str, dict[str, Any]]


def completion(**fields: Any) -> Body:
    return COMPLETIONS, {"prompt": "Hi", "max_tokens": 2, "temperature": 0, "ignore_eos": True, **fields}


def chat(*contents: Any, **fields: Any) -> Body:
    messages = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return CHAT, {"messages": messages, "max_tokens": 2, "temperature": 0, **fields}


def costliest() -> dict[str, list[Body]]:
    """By the first field of a row: its costliest requests, each of another shape."""
    ids = list(range(100, 100 + most.MAX_TOKEN_ID_LIST))
    prompt = [300 + i % 40_000 for i in range(CONTEXT - 8)]
    words = [f"{i:04d}" + "xqz" * 12 for i in range(most.MAX_BAD_WORDS // 2)]
    bias = dict.fromkeys(map(str, ids), 0.5)
    breakers = [" ", "\n", "ing", "th", *map(chr, range(97, 123))]
    stops = [" a" * (most.MAX_STOP_STRING_CHARS // 2 - 1) + f"{i:02d}" for i in range(most.MAX_STOP_STRINGS)]
    return {
        "metadata": [
            completion(metadata=[{}] * (most.MAX_JSON_VALUES - 100)),
            completion(metadata=[1000] * (most.MAX_JSON_NUMBERS - 100)),
            completion(metadata="\n" * (most.MAX_TEXT_CHARS - 100)),
        ],
        "messages": [
            chat(*["hi"] * (most.MAX_MESSAGES - 1)),
            chat(*[[{"type": "text", "text": "a"}] * most.MAX_PARTS] * 15),
            chat("<" * (most.MAX_CHAT_CHARS - 10)),
            chat("hello " * (CONTEXT - 100)),
        ],
        "prompt": [
            completion(prompt="a b " * (most.MAX_TEXT_CHARS // 4 - 10)),
            completion(prompt=[1000] * (most.MAX_JSON_NUMBERS - 100)),
            completion(prompt="hello " * (CONTEXT - 100)),
        ],
        "n": [
            completion(prompt=["a"] * (most.MAX_CHOICES // 4), n=4, max_tokens=1),
            completion(prompt=["a"] * 32, n=most.MAX_N, max_tokens=1, stop=stops, logit_bias=bias),
        ],
        "stop": [completion(prompt=" a" * 64, stop=stops, max_tokens=64, logit_bias={"253": 100})],
        "bad_words": [completion(bad_words=words, max_tokens=16)],
        "logit_bias": [
            completion(logit_bias=bias, allowed_token_ids=ids, stop_token_ids=ids[:-1], max_tokens=16)
        ],
        "dry_sequence_breakers": [
            completion(dry_multiplier=1, max_tokens=16, dry_sequence_breakers=breakers)
        ],
        "logprobs": [
            completion(logprobs=most.MAX_LOGPROBS, max_tokens=256),
            chat("Hi", logprobs=True, top_logprobs=most.MAX_LOGPROBS, max_tokens=256, ignore_eos=True),
        ],
        "prompt_logprobs": [
            completion(prompt=prompt, prompt_logprobs=most.MAX_LOGPROBS),
            completion(prompt=prompt, echo=True, logprobs=most.MAX_LOGPROBS),
            completion(prompt=prompt, echo=True, logprobs=most.MAX_LOGPROBS, stream=True),
        ],
        "return_token_ids": [completion(prompt=prompt, return_token_ids=True)],
        "chat_template_kwargs": [
            chat("Hi", chat_template_kwargs={f"k{i}": "v" * most.MAX_FIELD_CHARS for i in range(most.MAX_FIELDS - 2)})
        ],
        "model": [
            completion(model="m" * most.MAX_FIELD_CHARS),
            completion(cache_salt="s" * most.MAX_CACHE_SALT_CHARS, stream=True, stream_options={"include_usage": True}),
        ],
    }  # fmt: skip


def is_one_value(annotation: Any) -> bool:
    """Whether a field holds one number or switch, however it is annotated."""
    if annotation in (int, float, bool, type(None)):
        return True
    parts = get_args(annotation)
    return bool(parts) and all(is_one_value(part) for part in parts if isinstance(part, type) or get_args(part))


def test_every_field_that_can_be_long_has_a_price() -> None:
    priced = {name for price in PRICES for name in price.fields}
    for schema in (ChatRequest, CompletionRequest):
        for name, field in schema.model_fields.items():
            assert name in priced or is_one_value(field.annotation), f"{name} has no row in the price list"


def test_every_price_has_its_costliest_request_and_the_page_is_written_from_them() -> None:
    assert [price.fields[0] for price in PRICES] == list(costliest())
    page = Path(__file__).parents[2] / "docs/limits.md"
    assert page.read_text() == "\n".join(as_markdown()) + "\n", "python -m octavo.api.price_list > docs/limits.md"


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Any]:
    """``server(coroutine function of the application)``: runs it on the loop that has the engine."""
    loop = asyncio.new_event_loop()
    engine = AsyncEngine(EngineConfig(model=str(model_path), max_model_len=CONTEXT, kv_cache_memory=512 << 20))
    loop.run_until_complete(engine.start())
    app = create_app(engine, ServerConfig())
    gc.collect()
    threshold = gc.get_threshold()
    collect_seldom()  # as the server does once it is ready
    yield lambda talk: loop.run_until_complete(talk(app))
    loop.run_until_complete(engine.stop())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gc.set_threshold(*threshold)
    gc.unfreeze()


async def measured(app: Any, path: str, body: bytes, times: int) -> tuple[Costs, list[int]]:
    with counted() as costs:
        answers = await asyncio.gather(*(ask(app, path, body) for _ in range(times)))
    return costs, [status for status, _ in answers]


@pytest.mark.slow
@pytest.mark.parametrize("price", PRICES, ids=lambda price: price.fields[0])
def test_the_costliest_request_of_each_price_keeps_to_it_alone_and_many_at_once(server: Any, price: Price) -> None:
    async def talk(app: Any) -> None:
        served = []
        for path, fields in costliest()[price.fields[0]]:
            body = encoded(fields)
            await ask(app, path, body)  # words, tokens and code that are met for the first time
            for times in (1, MANY):
                if times == MANY and price.fields[0] == "prompt_logprobs":  # seconds of kernels each
                    continue
                statuses, over = await kept_to(app, price, fields, body, path, times)
                assert set(statuses) <= {200, 400, 404} | ({429} if times == MANY else set()), statuses
                served += [status for status in statuses if status == 200 and times == 1]
                assert not over
        assert served, "a request that is refused does not show what one costs"

    server(talk)


async def kept_to(
    app: Any, price: Price, fields: Mapping[str, Any], body: bytes, path: str, times: int
) -> tuple[list[int], list[Any]]:
    """Statuses, and what was over its bound in each of ``TRIES``: CPU time has the machine's own hiccups in it.

    (The first touch of memory that a virtual machine has never used can take a tenth of a second of it.)
    """
    over: list[Any] = []
    for _ in range(TRIES):
        costs, statuses = await measured(app, path, body, times)
        over = [
            (who, list(fields), costs.longest_s)
            for who, seconds in costs.longest_s.items()
            if seconds * 1e3 > (GARBAGE_MS if who == "garbage" else price.longest_ms)
        ]
        if times == 1 and sum(costs.total_s.values()) * 1e3 > price.cpu_ms:
            over.append((list(fields), costs.total_s))
        if not over:
            break
    return statuses, over


@pytest.mark.slow
def test_memory_comes_back_after_the_costliest_requests(server: Any) -> None:
    bodies = [body for bodies in costliest().values() for body in bodies]
    num_sequences = 0
    for _, fields in bodies:
        num_prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
        num_sequences += fields.get("n", 1) * (num_prompts if num_prompts <= most.MAX_PROMPTS else 1)

    async def all_of_them(app: Any) -> None:
        for path, fields in bodies:
            await ask(app, path, encoded(fields))

    async def talk(app: Any) -> None:
        await all_of_them(app)
        tracemalloc.start()
        try:
            before = settled_bytes()
            await all_of_them(app)
            await asyncio.sleep(0.1)  # the engine lets go of the last one in its next turn
            left = settled_bytes() - before
        finally:
            tracemalloc.stop()
        assert left < LEFT_BYTES + num_sequences * TRACE_BYTES

    server(talk)
