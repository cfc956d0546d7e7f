"""From one HTTP request to the engine's sequences and back: several prompts, n choices each, one stream of news."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from octavo.api.engine_protocol import OutputStream
from octavo.core.errors import EngineUnavailable, NoTokenLeft, RequestFailed
from octavo.core.output import RequestOutput, Usage, join_outputs
from octavo.core.plan import SampledToken

#: Prompt logprobs come in one piece; they are handed on in such pieces, so that no step of the event loop is long.
LOGPROB_SLICE = 64

#: (choice or prompt index, what is new) pairs.
News = list[tuple[int, RequestOutput]]


class Generation:
    """All choices of one HTTP request, numbered prompt-major: choice = prompt index * n + choice index.

    Iterate ``news()``; call ``abort()`` when leaving early. One failing choice fails the whole request.
    """

    def __init__(self, streams: Sequence[OutputStream], *, n: int) -> None:
        self._streams = streams
        self._n = n
        self._usages: dict[int, Usage] = {}

    @property
    def num_choices(self) -> int:
        return len(self._streams) * self._n

    async def news(self) -> AsyncGenerator[News]:
        """(choice, what is new) pairs, at most one pair per choice at a time.

        What comes while the reader is busy stays in the streams, which merge it: a slow reader costs memory for text
        and logprobs, not for events, and a stream ends where that is over ``MAX_UNREAD_BYTES``.
        Raises NoTokenLeft, RequestFailed or EngineUnavailable if a choice ends in any way but "stop" or "length".
        """
        if len(self._streams) == 1:
            async for outputs in self._streams[0]:
                yield self._take([(output.choice_index, output) for output in outputs])
        else:
            async with aclosing(_merge_streams(self._streams)) as merged:
                async for pairs in merged:
                    yield self._take([(prompt * self._n + output.choice_index, output) for prompt, output in pairs])
        if len(self._usages) != self.num_choices:
            raise RequestFailed(f"only {len(self._usages)} of {self.num_choices} choices have ended")

    def abort(self) -> None:
        """End what still runs. Safe to call twice, and after the end."""
        for stream in self._streams:
            stream.abort()

    def usage_json(self) -> str:
        """The ``usage`` object: every prompt counted once, however many choices it has."""
        prompts = [self._usages[prompt * self._n] for prompt in range(len(self._streams))]
        num_prompt = sum(usage.prompt_tokens for usage in prompts)
        num_output = sum(usage.completion_tokens for usage in self._usages.values())
        num_cached = sum(usage.cached_tokens for usage in prompts)
        return (
            f'{{"prompt_tokens":{num_prompt},"completion_tokens":{num_output},"total_tokens":{num_prompt + num_output},'
            f'"prompt_tokens_details":{{"cached_tokens":{num_cached}}},'
            '"completion_tokens_details":{"reasoning_tokens":0}}'
        )

    def _take(self, news: News) -> News:
        """``news``, merged; notes whose end is among it."""
        news = merge(news)
        for choice, output in news:
            if output.finish_reason is not None:
                self._finish(choice, output)
        return news

    def _finish(self, choice: int, output: RequestOutput) -> None:
        if output.failure == "no_token_left":
            raise NoTokenLeft(f"generation failed: {output.stop_reason}")
        if output.finish_reason == "error":
            raise RequestFailed(f"generation failed: {output.stop_reason or 'see the log of the server'}")
        if output.finish_reason == "abort":
            raise EngineUnavailable("generation was aborted: the server is shutting down")
        assert output.usage is not None
        self._usages[choice] = output.usage


def merge(news: News) -> News:
    """The same news with each choice's outputs joined into one."""
    if len(news) == 1:
        return news
    by_choice: dict[int, list[RequestOutput]] = {}
    for choice, output in news:
        by_choice.setdefault(choice, []).append(output)
    return [(choice, join_outputs(outputs)) for choice, outputs in by_choice.items()]


def _raise_failure(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _merge_streams(streams: Sequence[OutputStream]) -> AsyncGenerator[News]:
    """Several streams as one; what is ready at the same time comes together.

    While the reader is busy, at most one list of each stream is taken; more stays with the stream, which bounds it.
    """
    pending: News = []
    news, reader_waits = asyncio.Event(), asyncio.Event()

    async def pump(index: int, stream: OutputStream) -> None:
        try:
            async for outputs in stream:
                pending.extend((index, output) for output in outputs)
                news.set()
                await reader_waits.wait()
        finally:
            news.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        while pending or not all(task.done() for task in tasks):
            reader_waits.set()
            await news.wait()
            reader_waits.clear()
            news.clear()
            if pending:
                taken = pending[:]
                pending.clear()
                yield taken
            _raise_failure(tasks)
        _raise_failure(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def sliced(tokens: Sequence[SampledToken]) -> AsyncGenerator[Sequence[SampledToken]]:
    """``tokens`` in pieces, with a breath for the event loop after each."""
    for start in range(0, len(tokens), LOGPROB_SLICE):
        yield tokens[start : start + LOGPROB_SLICE]
        await asyncio.sleep(0)
