"""``POST /v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.auth import Client
from octavo.api.engine_protocol import OutputStream
from octavo.api.generation import Generation, News, sliced
from octavo.api.json_body import body_schema, read_fields
from octavo.api.logprobs import CompletionLogprobs, comma_joined, json_string, prompt_logprobs, prompt_offsets
from octavo.api.response_text import Choice, JsonBlocks, encoded, finish_fields, head, id_list, id_list_pieces, new_id
from octavo.api.schemas_completions import DEFAULT_MAX_TOKENS, CompletionRequest
from octavo.api.service import Service, client_of, service_of
from octavo.api.sse import EventStream, event, until_disconnect
from octavo.core.errors import InvalidRequest
from octavo.core.output import RequestOutput
from octavo.core.plan import SampledToken
from octavo.core.steps import Steps

router = APIRouter(tags=["OpenAI"])

#: Prompts handed to the engine between two breaths of the event loop: under 2 ms with n = 4 and lists of full length.
SUBMIT_SLICE = 4


@router.post("/v1/completions", summary="Continue a prompt", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """OpenAI's completions, with vLLM's further sampling parameters."""
    service, client = service_of(request), client_of(request)
    service.check_ready()
    fields = await read_fields(request, service.text_workers, client.id, service.parse_completion)
    service.check_model(fields.model)
    answer = CompletionAnswer(service, fields)
    if fields.stream:
        generation = await until_disconnect(request.receive, answer.abort, answer.start(client))
        return EventStream(answer.events(generation), generation.abort)
    return await until_disconnect(request.receive, answer.abort, answer.whole(client))


class _Echo(NamedTuple):
    """A prompt as part of the answer."""

    text: str = ""
    offsets: Sequence[int] = ()  # of its tokens in the text, where logprobs are wanted


class CompletionAnswer:
    """One request's way from prompts to JSON. Choice = prompt index * n + choice index."""

    def __init__(self, service: Service, fields: CompletionRequest) -> None:
        self._service = service
        self._fields = fields
        self.id = new_id("cmpl")
        self.request_ids: list[str] = []  # the engine's, one per prompt
        self._prompts: list[Sequence[int]] = []
        self._echoes: list[_Echo] = []  # one per prompt
        self._generation: Generation | None = None

    def abort(self) -> None:
        """End what runs."""
        if self._generation is not None:
            self._generation.abort()

    async def start(self, client: Client) -> Generation:
        """Tokenise and submit every prompt, or none. Raises what is wrong, before anything has been answered."""
        fields, service = self._fields, self._service
        self._prompts = await self._encode(client)
        self._echoes = [_Echo()] * len(self._prompts)
        longest = service.engine.config.max_model_len
        if fields.echo and all(len(prompt) <= longest for prompt in self._prompts):  # a longer one is refused below
            size = 8 * sum(map(len, self._prompts))
            self._echoes = await service.text_workers.run(self._find_echoes(), client=client.id, size=size)
        sampling = await service.sampling_params(
            fields,
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.logprobs if self._echoes_logprobs else fields.prompt_logprobs,
            client=client,
        )
        streams: list[OutputStream] = []
        by_limit = {sampling.max_tokens: sampling}  # one record for all prompts, mostly
        try:
            for index, prompt in enumerate(self._prompts):
                if index % SUBMIT_SLICE == SUBMIT_SLICE - 1:
                    await asyncio.sleep(0)
                limit = self._max_tokens(len(prompt))
                if limit not in by_limit:
                    by_limit[limit] = replace(sampling, max_tokens=limit)
                sampling = by_limit[limit]
                request_id = self.id if len(self._prompts) == 1 else f"{self.id}-{index}"
                self.request_ids.append(request_id)
                streams.append(service.submit(prompt, sampling, fields, client, request_id=request_id))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        self._generation = Generation(streams, n=fields.n)
        return self._generation

    async def _encode(self, client: Client) -> list[Sequence[int]]:
        """Every prompt as token ids; all texts are one job."""
        prompts = self._fields.prompts
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if not texts:  # they are all of one kind
            return [prompt for prompt in prompts if not isinstance(prompt, str)]
        add_bos = None if self._fields.add_special_tokens else False
        return [*await self._service.engine.encode(texts, add_bos=add_bos, client=client.id)]

    def _find_echoes(self) -> Steps[list[_Echo]]:
        """For a text worker: a microsecond or two per token."""
        echoes = []
        for prompt, token_ids in zip(self._fields.prompts, self._prompts, strict=True):
            yield
            typed = isinstance(prompt, str)
            text = prompt if isinstance(prompt, str) else self._decode(prompt)
            offsets: list[int] = []
            if self._echoes_logprobs:
                tokenizer = self._service.engine.tokenizer
                offsets = yield from prompt_offsets(tokenizer, token_ids, text, typed=typed)
            echoes.append(_Echo(text, offsets))
        return echoes

    def _decode(self, prompt: Sequence[int]) -> str:
        tokenizer = self._service.engine.tokenizer
        worst = max(prompt)
        if worst >= tokenizer.vocab_size:
            raise InvalidRequest(
                f"the prompt has token id {worst} but the vocabulary has {tokenizer.vocab_size} tokens", param="prompt"
            )
        return tokenizer.decode(prompt)

    def _max_tokens(self, num_prompt_tokens: int) -> int | None:
        """What the request says, else OpenAI's 16, or what is left of the context if that is less.

        None if nothing is left: the engine then refuses the prompt, rather than a limit that nobody has set.
        """
        if self._fields.max_tokens is not None:
            return self._fields.max_tokens
        room = self._service.engine.config.max_model_len - num_prompt_tokens
        return min(DEFAULT_MAX_TOKENS, room) if room > 0 else None

    @property
    def _echoes_logprobs(self) -> bool:
        return self._fields.echo and self._fields.logprobs is not None

    def _logprobs(self, choice: int) -> CompletionLogprobs:
        return CompletionLogprobs(self._service.token_texts, start=len(self._echoes[choice // self._fields.n].text))

    async def _add_prompt_logprobs(
        self, logprobs: CompletionLogprobs, prompt: int, tokens: Sequence[SampledToken]
    ) -> None:
        """The echoed prompt's part of the arrays. tokens: of its positions 1, 2, ..."""
        num_top, offsets = self._fields.logprobs or 0, iter(self._echoes[prompt].offsets)
        logprobs.add(SampledToken(token_id=self._prompts[prompt][0]), num_top=num_top, offset=next(offsets))
        async for piece in sliced(tokens):
            for token in piece:
                logprobs.add(token, num_top=num_top, offset=next(offsets))

    async def whole(self, client: Client) -> Response:
        """The answer in one piece."""
        fields = self._fields
        generation = await self.start(client)
        choices = [Choice() for _ in range(generation.num_choices)]
        arrays = [self._logprobs(choice) for choice in range(generation.num_choices)]
        of_prompts: list[list[str]] = [["null"] for _ in self._prompts]
        prompt_first = _PromptFirst(fields.n, holds_back=self._echoes_logprobs)
        try:
            async with aclosing(generation.news()) as news:
                async for new in news:
                    for choice, output, of_prompt in prompt_first.arrange(new):
                        prompt, is_first = choice // fields.n, not choices[choice].texts
                        choices[choice].add(output)
                        if is_first and self._echoes_logprobs:
                            await self._add_prompt_logprobs(arrays[choice], prompt, of_prompt)
                        if is_first and choice % fields.n == 0 and fields.prompt_logprobs is not None:
                            async for piece in sliced(of_prompt):
                                of_prompts[prompt] += prompt_logprobs(piece, self._service.token_texts)
                        for token in output.logprobs or ():
                            arrays[choice].add(token, num_top=fields.logprobs or 0)
        finally:
            generation.abort()
        return JsonBlocks(await encoded(self._pieces(generation, choices, arrays, of_prompts)))

    def _pieces(
        self,
        generation: Generation,
        choices: Sequence[Choice],
        arrays: Sequence[CompletionLogprobs],
        of_prompts: Sequence[Sequence[str]],
    ) -> Iterator[str]:
        """The JSON text. of_prompts: per prompt, the items of ``prompt_logprobs``."""
        opening = f'{head(self._service, self.id, "text_completion")},"choices":['
        for index, (choice, array) in enumerate(zip(choices, arrays, strict=True)):
            yield opening
            yield from self._choice(index, choice, array, of_prompts[index // self._fields.n])
            opening = ","
        yield f'],"usage":{generation.usage_json()}}}'

    def _choice(self, index: int, choice: Choice, array: CompletionLogprobs, of_prompt: Sequence[str]) -> Iterator[str]:
        fields, prompt = self._fields, index // self._fields.n
        yield f'{{"index":{index},"text":{json_string(self._echoes[prompt].text + "".join(choice.texts))},"logprobs":'
        yield from array.take_pieces() if fields.logprobs is not None else ("null",)
        yield f",{choice.finish}"
        if fields.prompt_logprobs is not None:
            yield ',"prompt_logprobs":['
            yield from comma_joined(of_prompt)
            yield "]"
        if fields.return_token_ids:
            yield f',"token_ids":{id_list(choice.token_ids)},"prompt_token_ids":'
            yield from id_list_pieces(self._prompts[prompt])
        yield "}"

    async def events(self, generation: Generation) -> AsyncGenerator[bytes | Sequence[bytes]]:
        """The answer as events: text in pieces, the last piece of a choice with its end; then usage, if asked for."""
        fields = self._fields
        chunk_head = head(self._service, self.id, "text_completion")
        usage = ',"usage":null' if fields.include_usage else ""
        opening, closing = f'data: {chunk_head},"choices":[{{"index":', f"}}]{usage}}}\n\n"
        arrays: dict[int, CompletionLogprobs] = {}
        prompt_first = _PromptFirst(fields.n, holds_back=self._echoes_logprobs)
        async with aclosing(generation.news()) as news:
            async for items in news:
                pieces: list[str] = []
                is_long = False  # megabytes, where the logprobs of a long prompt are in it
                for choice, output, of_prompt in prompt_first.arrange(items):
                    is_first = choice not in arrays
                    if is_first:
                        arrays[choice] = self._logprobs(choice)
                        if self._echoes_logprobs:
                            is_long = True
                            await self._add_prompt_logprobs(arrays[choice], choice // fields.n, of_prompt)
                    if chunk := self._chunk(choice, output, arrays[choice], is_first=is_first):
                        pieces += (f"{opening}{choice},", *chunk, closing)
                if pieces:
                    yield await encoded(pieces) if is_long else "".join(pieces).encode()
        if fields.include_usage:
            yield event(f'{chunk_head},"choices":[],"usage":{generation.usage_json()}}}')

    def _chunk(
        self, choice: int, output: RequestOutput, array: CompletionLogprobs, *, is_first: bool
    ) -> tuple[str, ...]:
        """The fields of a chunk's choice, after its index, in pieces; () if there is nothing to tell."""
        fields, prompt = self._fields, choice // self._fields.n
        text = self._echoes[prompt].text + output.text if is_first else output.text
        for token in output.logprobs or ():
            array.add(token, num_top=fields.logprobs or 0)
        has_news = text or (output.token_ids and (fields.logprobs is not None or fields.return_token_ids))
        if not has_news and output.finish_reason is None:
            return ()
        logprobs = array.take_pieces() if fields.logprobs is not None else ("null",)
        finish = finish_fields(output) if output.finish_reason is not None else '"finish_reason":null'
        extra = ""
        if fields.return_token_ids:
            extra = f',"token_ids":{id_list(output.token_ids)}'
            if is_first:
                extra += f',"prompt_token_ids":{id_list(self._prompts[prompt])}'
        return (f'"text":{json_string(text)},"logprobs":', *logprobs, f",{finish}{extra}")


class _PromptFirst:
    """Puts the logprobs of its prompt beside what is new of a choice.

    The engine computes these once per prompt and gives them to its first choice; where all choices show them, the
    others wait for that one.
    """

    def __init__(self, n: int, *, holds_back: bool) -> None:
        """n: choices per prompt; holds_back: whether all of them show the logprobs of the prompt."""
        self._n = n
        self._holds_back = holds_back
        self._of_prompt: dict[int, Sequence[SampledToken]] = {}
        self._waiting: dict[int, News] = {}

    def arrange(self, news: News) -> list[tuple[int, RequestOutput, Sequence[SampledToken]]]:
        """(choice, what is new, logprobs of its prompt) of what can be told now."""
        arranged = []
        for choice, output in news:
            prompt = choice // self._n
            if choice % self._n == 0 and prompt not in self._of_prompt:
                self._of_prompt[prompt] = output.prompt_logprobs or ()
            if self._holds_back and prompt not in self._of_prompt:
                self._waiting.setdefault(prompt, []).append((choice, output))
                continue
            of_prompt = self._of_prompt.get(prompt, ())
            arranged.append((choice, output, of_prompt))
            if self._waiting:
                arranged += [(*held, of_prompt) for held in self._waiting.pop(prompt, ())]
        return arranged
