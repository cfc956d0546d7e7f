"""``POST /v1/chat/completions``."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Client
from octavo.api.generation import Generation, sliced
from octavo.api.json_body import body_schema, read_fields
from octavo.api.logprobs import chat_logprobs, comma_joined, json_string, prompt_logprobs
from octavo.api.response_text import Choice, JsonBlocks, encoded, finish_fields, head, id_list, id_list_pieces, new_id
from octavo.api.schemas_chat import ChatRequest
from octavo.api.service import Service, client_of, service_of
from octavo.api.sse import EventStream, event, until_disconnect
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput

router = APIRouter(tags=["OpenAI"])

_MAX_TOKENS = re.compile(r"\bmax_tokens\b")


@router.post("/v1/chat/completions", summary="Answer a conversation", openapi_extra=body_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """OpenAI's chat completions, with vLLM's further sampling parameters."""
    service, client = service_of(request), client_of(request)
    service.check_ready()
    fields = await read_fields(request, service.text_workers, client.id, ChatRequest.parse)
    service.check_model(fields.model)
    answer = ChatAnswer(service, fields)
    if fields.stream:
        generation = await until_disconnect(request.receive, answer.abort, answer.start(client))
        return EventStream(answer.events(generation), generation.abort)
    return await until_disconnect(request.receive, answer.abort, answer.whole(client))


class ChatAnswer:
    """One request's way from messages to JSON."""

    def __init__(self, service: Service, fields: ChatRequest) -> None:
        self._service = service
        self._fields = fields
        self.id = new_id("chatcmpl")
        self._texts = service.token_texts
        self._prompt: Sequence[int] = ()
        self._generation: Generation | None = None
        # What the answer goes on from, where it is wanted as part of the answer.
        self._echo: str = fields.last_text if fields.echo else ""

    def abort(self) -> None:
        """End what runs."""
        if self._generation is not None:
            self._generation.abort()

    async def start(self, client: Client) -> Generation:
        """Render, tokenise, submit. Raises what is wrong with the request, before anything has been answered."""
        fields, limit = self._fields, self._fields.output_limit
        try:
            sampling = await self._service.sampling_params(
                fields,
                max_tokens=limit[1],
                logprobs=fields.num_logprobs,
                prompt_logprobs=fields.prompt_logprobs,
                client=client,
            )
            self._prompt = await self._encode(client)
            stream = self._service.submit(self._prompt, sampling, fields, client, request_id=self.id)
        except InvalidRequest as error:
            if error.param == "max_tokens":  # by the name that the client gave it
                raise type(error)(_MAX_TOKENS.sub(limit[0], str(error)), param=limit[0]) from error
            error.param = {"prompt": "messages", "logprobs": "top_logprobs"}.get(error.param or "", error.param)
            raise
        self._generation = Generation([stream], n=fields.n)
        return self._generation

    async def _encode(self, client: Client) -> Sequence[int]:
        """The prompt. To go on from the last message, its text follows the header that the template gives an answer."""
        engine, fields = self._service.engine, self._fields
        if not fields.continue_final_message:
            return await engine.encode_chat(fields.messages, client=client.id, **fields.template_kwargs)
        header = await engine.encode_chat(fields.messages[:-1], client=client.id, **fields.template_kwargs)
        (begun,) = await engine.encode([fields.last_text], parse_special=False, add_bos=False, client=client.id)
        return [*header, *begun]

    async def whole(self, client: Client) -> Response:
        """The answer in one piece."""
        fields = self._fields
        generation = await self.start(client)
        choices = [Choice() for _ in range(fields.n)]
        logprobs: list[list[str]] = [[] for _ in choices]
        of_prompt: list[str] = ["null"]
        try:
            async with aclosing(generation.news()) as news:
                async for items in news:
                    for index, output in items:
                        choices[index].add(output)
                        if fields.logprobs:
                            logprobs[index] += chat_logprobs(output.logprobs or (), self._texts)
                        async for piece in sliced(output.prompt_logprobs or ()):
                            of_prompt += prompt_logprobs(piece, self._texts)
        finally:
            generation.abort()
        return JsonBlocks(await encoded(self._pieces(generation, choices, logprobs, of_prompt)))

    def _pieces(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        logprobs: Sequence[Sequence[str]],
        of_prompt: Sequence[str],
    ) -> Iterator[str]:
        """The JSON text. logprobs: per choice, items of its ``content``; of_prompt: those of ``prompt_logprobs``."""
        opening = f'{head(self._service, self.id, "chat.completion")},"choices":['
        for index, choice in enumerate(choices):
            yield opening
            yield from self._choice(index, choice, logprobs[index])
            opening = ","
        yield f'],"usage":{generation.usage_json()}'
        if self._fields.prompt_logprobs is not None:
            yield ',"prompt_logprobs":['
            yield from comma_joined(of_prompt)
            yield "]"
        if self._fields.return_token_ids:
            yield ',"prompt_token_ids":'
            yield from id_list_pieces(self._prompt)
        yield "}"

    def _choice(self, index: int, choice: Choice, logprobs: Sequence[str]) -> Iterator[str]:
        text = json_string(self._echo + "".join(choice.texts))
        yield f'{{"index":{index},"message":{{"role":"assistant","content":{text},"refusal":null}},"logprobs":'
        if self._fields.logprobs:
            yield '{"content":['
            yield from comma_joined(logprobs)
            yield '],"refusal":null}'
        else:
            yield "null"
        yield f",{choice.finish}"
        if self._fields.return_token_ids:
            yield f',"token_ids":{id_list(choice.token_ids)}'
        yield "}"

    async def events(self, generation: Generation) -> AsyncGenerator[bytes]:
        """The answer as events: per choice its role, its text in pieces, its end; then usage, where asked for."""
        fields = self._fields
        chunk_head = head(self._service, self.id, "chat.completion.chunk")
        usage = ',"usage":null' if fields.include_usage else ""
        opening, closing = f'data: {chunk_head},"choices":[{{"index":', f"}}]{usage}}}\n\n"
        started: set[int] = set()
        async with aclosing(generation.news()) as news:
            async for items in news:
                chunks: list[str] = []
                for index, output in items:
                    if index not in started:
                        started.add(index)
                        # vLLM's place for the prompt's ids: once, beside the choices
                        once = f',"prompt_token_ids":{id_list(self._prompt)}' * (
                            fields.return_token_ids and len(started) == 1
                        )
                        first = f'"delta":{{"role":"assistant","content":{json_string(self._echo)}}}'
                        chunks.append(
                            f'{opening}{index},{first},"logprobs":null,"finish_reason":null}}]{usage}{once}}}\n\n'
                        )
                    if (piece := self._piece(output)) is not None:
                        chunks.append(f'{opening}{index},{piece},"finish_reason":null{closing}')
                    if output.finish_reason is not None:
                        chunks.append(f'{opening}{index},"delta":{{}},"logprobs":null,{finish_fields(output)}{closing}')
                if chunks:
                    yield "".join(chunks).encode()
        if fields.include_usage:
            yield event(f'{chunk_head},"choices":[],"usage":{generation.usage_json()}}}')

    def _piece(self, output: RequestOutput) -> str | None:
        """Delta and logprobs of a chunk; None if there is nothing to tell."""
        fields = self._fields
        if not output.text and not (output.token_ids and (fields.logprobs or fields.return_token_ids)):
            return None
        entries = "null"
        if fields.logprobs:
            entries = f'{{"content":[{",".join(chat_logprobs(output.logprobs or (), self._texts))}],"refusal":null}}'
        token_ids = f',"token_ids":{id_list(output.token_ids)}' if fields.return_token_ids else ""
        return f'"delta":{{"content":{json_string(output.text)}}},"logprobs":{entries}{token_ids}'
