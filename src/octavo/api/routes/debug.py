"""The debug routes: a request's life, a batch step by step, the prefix cache.

Access (``api.auth``): everything with an admin key, or on a loopback bind without keys. A client with an ordinary key
sees its own requests; of others only counts and lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Client
from octavo.api.error_handlers import ApiError
from octavo.api.generation import Generation
from octavo.api.inspections import json_answer
from octavo.api.json_body import read_fields
from octavo.api.response_text import Choice
from octavo.api.routes.chat import ChatAnswer
from octavo.api.routes.completions import CompletionAnswer
from octavo.api.schemas_chat import ChatRequest
from octavo.api.schemas_completions import CompletionRequest
from octavo.api.service import Service, client_of, service_of
from octavo.api.sse import until_disconnect
from octavo.core.errors import InvalidRequest
from octavo.observability.snapshots import step_dict

router = APIRouter(prefix="/debug", tags=["debug"])


@router.post("/lifecycle", summary="Run one request and show its life")
async def run_lifecycle(request: Request) -> Response:
    """``{prompt | messages, max_tokens, ...}`` -> ``{request_id, text, events, summary}``.

    Takes what the chat or completions endpoint takes, for one sequence.
    """
    service, client = _debugger(request)
    workers = service.text_workers
    answer = await read_fields(request, workers, client.id, lambda body: _single_answer(service, body))
    choices = await until_disconnect(request.receive, answer.abort, _run(answer, client))
    found = await service.engine.lifecycle(answer.id)
    assert found is not None, "a request that has just ended is remembered"
    return await json_answer(lambda: {**_shown_to(client, found.as_dict()), "text": "".join(choices[0].texts)})


@router.get("/lifecycle/{request_id}", summary="Show a request's life")
async def read_lifecycle(request: Request, request_id: str) -> Response:
    """Events and summary of a live or recently ended request, by the ``id`` of its answer."""
    service, client = _debugger(request)
    found = await service.engine.lifecycle(request_id)
    if found is None or not (client.is_admin or found.client == client.id):
        raise ApiError(404, f"request {request_id[:80]!r} is not known, or not any more", code="request_not_found")
    return await json_answer(lambda: _shown_to(client, found.as_dict()))


@router.post("/batch", summary="Run prompts together and show the steps")
async def run_batch(request: Request) -> Response:
    """``{prompts, max_tokens, ...}`` -> ``{steps, outputs}``: what each step ran for whom, and why so much."""
    service, client = _debugger(request)
    fields = await read_fields(request, service.text_workers, client.id, lambda body: _batch_fields(service, body))
    service.check_model(fields.model)
    answer = CompletionAnswer(service, fields)
    before = await service.engine.steps(limit=1)
    with _named_as_here():
        choices = await until_disconnect(request.receive, answer.abort, _run(answer, client))
    own = {name if index == 0 else f"{name}#{index}" for name in answer.request_ids for index in range(fields.n)}
    records = await service.engine.steps(since=before[-1].step_id if before else -1)

    def steps() -> list[dict[str, Any]]:
        found = [step_dict(record) for record in records if not own.isdisjoint(record.chunks.request_ids)]
        return found if client.is_admin else [_without_others(step, own) for step in found]

    outputs = [
        {"index": index, "text": "".join(choice.texts), "token_ids": choice.token_ids, "finish_reason": choice.reason}
        for index, choice in enumerate(choices)
    ]
    return await json_answer(lambda: {"steps": steps(), "outputs": outputs})


@router.get("/prefix_cache", summary="The prefix cache in figures")
async def prefix_cache(request: Request) -> dict[str, Any]:
    """Depth, nodes, cached and pinned blocks, hits, misses, hit tokens, hit rate (by tokens), evictions."""
    service, _ = _debugger(request)
    return await service.engine.prefix_cache()


def _debugger(request: Request) -> tuple[Service, Client]:
    """The service and a caller who may debug. Raises 403, or 503 while loading."""
    service, client = service_of(request), client_of(request)
    if not client.id:  # anonymous: everybody's requests look like one's own
        service.keyring.require_admin(client)
    service.check_ready()
    return service, client


def _single_answer(service: Service, body: dict[str, Any]) -> ChatAnswer | CompletionAnswer:
    """An answer to one conversation or prompt. Raises InvalidRequest if the body asks for several sequences."""
    if ("prompt" in body) == ("messages" in body):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.get("n") not in (None, 1):
        raise InvalidRequest("n must be 1 here; POST /debug/batch runs several", param="n")
    body = _answer_alone(body)
    if "messages" in body:
        chat = ChatRequest.parse(body)
        service.check_model(chat.model)
        return ChatAnswer(service, chat)
    completion = service.parse_completion(body)
    service.check_model(completion.model)
    if len(completion.prompts) != 1:
        raise InvalidRequest("give one prompt here; POST /debug/batch runs several", param="prompt")
    return CompletionAnswer(service, completion)


def _batch_fields(service: Service, body: dict[str, Any]) -> CompletionRequest:
    if body.get("prompts") is None or "prompt" in body:
        raise InvalidRequest("give prompts: a list of strings or of lists of token ids", param="prompts")
    body["prompt"] = body.pop("prompts")
    with _named_as_here():
        return service.parse_completion(_answer_alone(body))


@contextmanager
def _named_as_here() -> Iterator[None]:
    """What completions call prompt is prompts here, in errors too."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == "prompt":
            error.param = "prompts"
            error.args = (str(error).replace("prompt[", "prompts["),)
        raise


def _answer_alone(body: dict[str, Any]) -> dict[str, Any]:
    """``body``, unless it wants what these routes do not show. Raises InvalidRequest."""
    for name in ("stream", "echo"):
        if body.get(name):
            raise InvalidRequest(f"debug routes show the answer alone, in one piece; leave {name} out", param=name)
    return body


async def _run(answer: ChatAnswer | CompletionAnswer, client: Client) -> list[Choice]:
    """All choices of an answer, finished."""
    generation: Generation = await answer.start(client)
    choices = [Choice() for _ in range(generation.num_choices)]
    try:
        async with aclosing(generation.news()) as news:
            async for items in news:
                for index, output in items:
                    choices[index].add(output)
    finally:
        generation.abort()
    return choices


def _shown_to(client: Client, life: dict[str, Any]) -> dict[str, Any]:
    """A life without the tokens of whoever else has the nearest cached prefix, unless an admin asks."""
    if client.is_admin:
        return life
    events = [{**event, "facts": _without_nearest(event["facts"])} for event in life["events"]]
    return {**life, "events": events}


def _without_nearest(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "nearest"}


def _without_others(step: dict[str, Any], own: set[str]) -> dict[str, Any]:
    """A step in which other clients' requests are counts and lengths."""

    def name(request_id: str) -> str | None:
        return request_id if request_id in own else None

    return {
        **step,
        "chunks": [{**chunk, "request_id": name(chunk["request_id"])} for chunk in step["chunks"]],
        "admitted": [
            {**item, "facts": _without_nearest(item["facts"])} for item in step["admitted"] if item["request_id"] in own
        ],
        "preempted": [name(request_id) for request_id in step["preempted"]],
        "waiting_for": {key: why for key, why in step["waiting_for"].items() if key in own},
    }
