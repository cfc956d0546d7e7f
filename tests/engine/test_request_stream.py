"""What gathers for a reader that does not come: joined, counted, bounded, and the same in the end."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.errors import ReaderTooSlow
from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import SampledToken
from octavo.engine import request_stream
from octavo.engine.request_stream import RequestStream, Unread

NAMES = ("a", "a#1", "a#2")


class Streams:
    """Streams of one engine, which aborts by noting it."""

    def __init__(self, **limits: int) -> None:
        self.unread = Unread(**limits)
        self.aborted: list[str] = []

    def new(self, *names: str) -> RequestStream:
        return RequestStream(names, abort=self.aborted.append, unread=self.unread)


def token_output(name: str, index: int, num_top: int | None = None, **fields: Any) -> RequestOutput:
    token_id = 1000 + index  # no small integer, of which there is one only
    logprobs = None
    if num_top is not None:
        top = tuple((token_id + rank, -0.25 * (rank + index)) for rank in range(num_top))
        logprobs = (SampledToken(token_id=token_id, logprob=-0.5 * index, top=top),)
    return RequestOutput(
        request_id=name,
        choice_index=NAMES.index(name),
        text=f" {index}",
        token_ids=(token_id,),
        logprobs=logprobs,
        **fields,
    )


def told(outputs: list[RequestOutput]) -> dict[str, tuple[Any, ...]]:
    """Per sequence all that it was told, however cut."""
    found = {}
    for name in {output.request_id for output in outputs}:
        own = [output for output in outputs if output.request_id == name]
        found[name] = (
            "".join(output.text for output in own),
            [token for output in own for token in output.token_ids],
            [token for output in own for token in output.logprobs or ()],
            [output.finish_reason for output in own if output.finish_reason],
            own[-1].usage,
        )
    return found


@given(order=st.lists(st.sampled_from(NAMES), min_size=1, max_size=400), reads=st.sets(st.integers(0, 400)))
def test_a_reader_is_told_the_same_however_seldom_it_comes(order: list[str], reads: set[int]) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=0)
    outputs = [token_output(name, index, num_top=2) for index, name in enumerate(order)]
    outputs += [token_output(name, 0, finish_reason="length", usage=usage) for name in NAMES]

    async def read() -> list[RequestOutput]:
        streams = Streams()
        stream = streams.new(*NAMES)
        found = []
        for index, output in enumerate(outputs):
            stream.deliver(output)
            if index in reads:
                found += await anext(stream)
        async for rest in stream:
            assert sum(len(output.token_ids) for output in rest) <= request_stream.JOIN_OUTPUTS
            found += rest
        assert (streams.unread.total, streams.aborted) == (0, [])
        return found

    assert told(asyncio.run(read())) == told(outputs)


def test_a_reader_that_keeps_up_gets_each_output_as_it_is() -> None:
    async def read() -> None:
        stream = Streams().new("a")
        for index in range(200):
            output = token_output("a", index)
            stream.deliver(output)
            (found,) = await anext(stream)
            assert found is output

    asyncio.run(read())


@pytest.mark.parametrize("num_top", [None, 0, 20])
def test_what_gathers_costs_text_and_logprobs_and_is_counted_as_such(num_top: int | None) -> None:
    """Counted within a third of what it takes; without logprobs under 100 bytes a token, of some 500 as they came."""
    streams, num_tokens = Streams(limit=1 << 30, total_limit=1 << 30), 6400
    stream = streams.new("a")
    tracemalloc.start()
    for index in range(num_tokens):
        stream.deliver(token_output("a", index, num_top))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.66 * taken < streams.unread.total < 1.5 * taken
    if num_top is None:
        assert taken < 100 * num_tokens


def test_a_reader_that_lets_too_much_gather_is_given_up_and_others_go_on() -> None:
    async def read() -> None:
        streams = Streams(limit=100_000)
        slow, other = streams.new("a", "a#1"), streams.new("a#2")
        other.deliver(token_output("a#2", 0))
        slow.deliver(token_output("a#1", 0, finish_reason="stop"))
        for index in range(1000):
            slow.deliver(token_output("a", index, num_top=20))
            if streams.aborted:
                break
        assert streams.aborted == ["a"]
        assert index < 100
        assert streams.unread.total == 0, "what had gathered is dropped at once"
        with pytest.raises(ReaderTooSlow, match=r"1\d{5} bytes of output were not read and the limit is 100000"):
            await anext(slow)
        assert len(await anext(other)) == 1

    asyncio.run(read())


def test_all_streams_together_are_bounded_and_the_one_with_most_is_given_up() -> None:
    streams = Streams(total_limit=100_000)
    small, large = streams.new("a"), streams.new("a#1")
    for index in range(64):
        small.deliver(token_output("a", index))
    for index in range(6400):
        large.deliver(token_output("a#1", index))
        if streams.aborted:
            break
    assert streams.aborted == ["a#1"]
    assert 0 < streams.unread.total < 10_000


def test_leaving_frees_what_has_gathered() -> None:
    streams = Streams()
    stream = streams.new("a")
    for index in range(1000):
        stream.deliver(token_output("a", index))
    assert streams.unread.total > 0
    stream.abort()
    assert (streams.unread.total, streams.aborted) == (0, ["a"])
