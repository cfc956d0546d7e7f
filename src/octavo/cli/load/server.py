"""How this server wants to be asked: found out by asking it, before anything is measured."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.cli.distributions import Lengths
from octavo.cli.load.http import Broken, ConnectFailed, HttpClient, Url
from octavo.cli.load.prompts import WORDS, PromptKind, PromptMaker, TextScale
from octavo.cli.load.sample import AnswerRecorder, Sample, error_message
from octavo.cli.load.workload import Asker, EndpointKind, PlannedRequest
from octavo.core.errors import ServerUnusable

PATHS: Mapping[EndpointKind, str] = {"completions": "/completions", "chat": "/chat/completions"}
#: Words of the two texts by which a server's way of counting is measured.
_PROBE_WORDS = (16, 144)
_PROBE_IDS = 32
_VERSION = re.compile(r"/v[0-9]+\w*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user wants of every request."""

    endpoint: EndpointKind
    model: str | None  # None: the first that the server lists
    prompts: PromptKind | Literal["auto"]
    id_range: Lengths
    has_prefix: bool  # in a chat: requests carry a system message
    seed: int
    temperature: float
    ignore_eos: bool
    token_ids: bool  # ask for each event's token ids, so that events with several are known
    extra: Mapping[str, Any]  # further fields
    timeout_s: float


@dataclass(slots=True)
class Server:
    """A server and what it has shown to take. ``optional``: fields sent beyond the common ones."""

    client: HttpClient
    wishes: Wishes
    clock: Callable[[], float]
    model: str = ""
    optional: dict[str, Any] = field(default_factory=dict)
    limit_field: str = "max_tokens"
    notes: list[str] = field(default_factory=list)  # for the user: what was left out and why
    asker: Asker = field(init=False)

    def body(self, planned: PlannedRequest) -> bytes:
        """A request's body. Later ones of these win: common, optional, the user's extra, the request's own fields."""
        optional = self.optional
        if not planned.has_fixed_length:
            optional = {name: value for name, value in optional.items() if name != "ignore_eos"}
        fields = {
            "model": self.model,
            **planned.prompt,
            self.limit_field: planned.output_tokens,
            "temperature": self.wishes.temperature,
            "stream": True,
            **optional,
            **self.wishes.extra,
            **planned.fields,
        }
        return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()

    async def ask(self, planned: PlannedRequest, body: bytes, arrival_s: float) -> Sample:
        """Send one request and watch its answer to its end. Every failure is the sample's; nothing is raised."""
        sample = Sample(
            index=planned.index,
            group=planned.group,
            asked_prompt_tokens=planned.asked_prompt_tokens,
            asked_output_tokens=planned.output_tokens,
            arrival_s=arrival_s,
        )
        recorder = AnswerRecorder(sample, planned.expect)
        sample.sent_s = self.clock()
        try:
            async with asyncio.timeout(self.wishes.timeout_s):
                await self.client.exchange("POST", PATHS[self.wishes.endpoint], body, recorder)
            recorder.close(self.clock())
        except TimeoutError:
            sample.fail("timeout", f"not complete after {self.wishes.timeout_s:g} s")
        except ConnectFailed as error:
            sample.fail("connection", str(error))
        except Broken as error:
            sample.fail("truncated" if sample.status == 200 else "connection", str(error))
        except ValueError as error:
            sample.fail("protocol", f"not a stream of JSON events: {error}")
        except asyncio.CancelledError:
            sample.fail("interrupted")
        if sample.end_s is None:
            sample.end_s = self.clock()
        if planned.has_fixed_length and "ignore_eos" in self.optional and sample.output_tokens < planned.output_tokens:
            sample.fail("short", f"{sample.output_tokens} tokens of {planned.output_tokens} asked")
        return sample


def client_of(url: str, api_key: str | None, clock: Callable[[], float]) -> HttpClient:
    """For the API under ``url``. Raises ConfigError for what is no URL."""
    place = Url.parse(url)
    if not _VERSION.search(place.path):
        place = Url(place.host, place.port, place.path + "/v1", place.tls)
    return HttpClient(place, [("Authorization", f"Bearer {api_key}")] if api_key else [], clock)


async def find_out(client: HttpClient, wishes: Wishes, clock: Callable[[], float]) -> Server:
    """A server that has answered. Raises ServerUnusable."""
    server = Server(client, wishes, clock)
    server.asker = Asker(endpoint=wishes.endpoint, maker=PromptMaker("text"), seed=wishes.seed)
    listed = await _models(server)
    server.model = wishes.model or (listed[0] if listed else "")
    if not server.model:
        raise ServerUnusable(f"{client.url}/models lists no model; give --model NAME")
    if wishes.ignore_eos:
        server.optional["ignore_eos"] = True
    server.optional["stream_options"] = {"include_usage": True}
    if wishes.token_ids:
        server.optional["return_token_ids"] = True
    server.asker = Asker(endpoint=wishes.endpoint, maker=await _prompt_maker(server, listed), seed=wishes.seed)
    return server


class _Body:
    """An answer kept whole."""

    def __init__(self) -> None:
        self.status, self.body = 0, b""

    def on_response(self, status: int, content_type: str) -> None:
        self.status = status

    def on_body(self, data: bytes, now_s: float) -> None:
        self.body = (self.body + data)[: 4 << 20]


async def _models(server: Server) -> list[str]:
    """Names that /models lists; [] where a server has no such list."""
    answer, place = _Body(), server.client.url
    try:
        async with asyncio.timeout(server.wishes.timeout_s):
            await server.client.exchange("GET", "/models", b"", answer)
    except TimeoutError:
        raise ServerUnusable(
            f"{place} took the connection but did not answer; raise --timeout, or check --url"
        ) from None
    except ConnectFailed as error:
        raise ServerUnusable(f"cannot reach {place}: {error}; is the server running, and is --url right?") from error
    except Broken as error:
        raise ServerUnusable(f"{place} does not speak HTTP/1.1: {error}; is --url right?") from error
    _check_key(server, answer.status, answer.body)
    try:
        return [str(model["id"]) for model in json.loads(answer.body)["data"]] if answer.status == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


def _check_key(server: Server, status: int | None, body: bytes) -> None:
    if status in (401, 403):
        raise ServerUnusable(
            f"{server.client.url} answered {status}: {error_message(body) or 'no access'}; give its key with --api-key"
        )


async def _prompt_maker(server: Server, listed: list[str]) -> PromptMaker:
    """Ids or text, by the user's wish and what the server takes; for text also how it counts."""
    wishes = server.wishes
    before = WORDS[0] if wishes.has_prefix else None  # a template may put in a system message where there is none
    counts = []
    for words in _PROBE_WORDS:
        text = PromptMaker("text").make(words, random.Random(words))
        sample = await _accepted(server, server.asker.given(text, before), listed)
        counts.append((words + (before is not None), sample.prompt_tokens))
    if not sample.completion_tokens:
        server.notes.append("the server sends no usage: output tokens are counted by events, prompts not at all")
    if wishes.endpoint == "completions" and wishes.prompts != "text":
        maker = PromptMaker("ids", id_range=wishes.id_range)
        sample = await _probe(server, server.asker.given(maker.make(_PROBE_IDS, random.Random(0))))
        if sample.failure is None:
            return maker
        if wishes.prompts == "ids":
            raise ServerUnusable(f"the server refuses token ids as a prompt ({_shown(sample)}); use --prompts text")
        server.notes.append(f"prompts are text: the server refuses token ids ({_shown(sample)})")
    (short, short_tokens), (long, long_tokens) = counts
    if short_tokens is None or long_tokens is None:
        server.notes.append("prompts are as many words as tokens were asked for: the server does not count them")
        return PromptMaker("text")
    return PromptMaker("text", TextScale.fit((short, short_tokens), (long, long_tokens)))


async def _accepted(server: Server, prompt: Mapping[str, Any], listed: list[str]) -> Sample:
    """A probe that went well, after leaving out what the server refuses. Raises ServerUnusable."""
    while True:
        sample = await _probe(server, prompt)
        if sample.failure is None or sample.failure in ("short", "empty"):
            return sample
        if sample.status in (400, 422):
            if server.limit_field == "max_tokens" and "max_completion_tokens" in sample.message:
                server.limit_field = "max_completion_tokens"
                continue
            named = [name for name in server.optional if name in sample.message]
            if name := next(iter(named or list(server.optional)[::-1]), None):
                del server.optional[name]
                server.notes.append(f"the server refuses {name}, which is left out ({_shown(sample)})")
                continue
        raise ServerUnusable(_why(server, sample, listed))


async def _probe(server: Server, prompt: Mapping[str, Any]) -> Sample:
    planned = PlannedRequest(index=-1, prompt=prompt, asked_prompt_tokens=None, output_tokens=2)
    return await server.ask(planned, server.body(planned), server.clock())


def _shown(sample: Sample) -> str:
    return f"{sample.failure} {sample.status}: {sample.message}" if sample.failure == "status" else sample.message


def _why(server: Server, sample: Sample, listed: list[str]) -> str:
    """One line about a server that cannot be measured, with the way out."""
    where = f"{server.client.url}{PATHS[server.wishes.endpoint]}"
    _check_key(server, sample.status, sample.message.encode())
    if sample.failure != "status":
        return f"{where} is not OpenAI-like: {sample.message}; is --url right?"
    said = f"{where} answered {sample.status}: {sample.message or 'nothing'}"
    if listed and server.model not in listed:
        return f"{said}; the server lists the models {', '.join(listed[:8])}: give one with --model"
    if sample.status in (404, 405):
        other = "chat" if server.wishes.endpoint == "completions" else "completions"
        return f"{said}; is --url right, and --model? --endpoint {other} asks the other endpoint"
    return f"{said}; --extra-body can add or, with null, leave out fields"
