"""Several prompts as one stream of news."""

from __future__ import annotations

import asyncio

from octavo.api.generation import Generation
from octavo.core.output import RequestOutput, Usage
from octavo.engine.request_stream import RequestStream, Unread


def test_what_comes_for_several_prompts_while_the_reader_is_busy_gathers_where_it_is_bounded() -> None:
    names, num_tokens = ("a-0", "a-1", "a-2"), 640

    async def run() -> None:
        unread = Unread()
        streams = [RequestStream([name], abort=lambda _: None, unread=unread) for name in names]
        news = Generation(streams, n=1).news()
        texts = dict.fromkeys(range(len(names)), "")

        def deliver(index: int) -> None:
            for name, stream in zip(names, streams, strict=True):
                last = index == num_tokens - 1
                usage = Usage(prompt_tokens=1, completion_tokens=num_tokens, cached_tokens=0) if last else None
                finish = "length" if last else None
                stream.deliver(
                    RequestOutput(
                        request_id=name, text=f"{index} ", token_ids=(index,), finish_reason=finish, usage=usage
                    )
                )

        deliver(0)
        for choice, output in await anext(news):
            texts[choice] += output.text
        for index in range(1, num_tokens):  # the reader is busy writing
            deliver(index)
            await asyncio.sleep(0)
        assert unread.total > 0
        assert all(len(stream._backlog) == (num_tokens - 1) // 64 for stream in streams)
        async for items in news:
            for choice, output in items:
                texts[choice] += output.text
        assert set(texts.values()) == {"".join(f"{index} " for index in range(num_tokens))}
        assert unread.total == 0

    asyncio.run(run())
