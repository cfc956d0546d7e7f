"""Server-sent events survive any cut of the bytes that carry them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.cli.load.sse import EventSplitter

#: Text without line ends: what a data line may hold.
LINES = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=12).map(str.encode)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Events among comments, blank lines and other fields, with all three line ends."""
    body = b""
    for _ in range(draw(st.integers(0, 5))):
        lines = draw(st.lists(LINES, min_size=1, max_size=3))
        for line in lines:
            body += draw(st.sampled_from([b"", b": keep-alive" + draw(ENDS), b"id: 7" + draw(ENDS)]))
            body += b"data: " + line + draw(ENDS)
        body += draw(ENDS) * 2
        body += draw(st.sampled_from([b"", draw(ENDS), b": comment" + draw(ENDS)]))
    return body


def reference(body: bytes) -> list[bytes]:
    """The standard's algorithm, on the whole body."""
    lines = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    events, data = [], []
    for line in lines:
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif not line and data:
            events.append(b"\n".join(data))
            data = []
    return events


@given(bodies(), st.lists(st.integers(0, 200), max_size=12))
def test_events_do_not_depend_on_where_the_bytes_are_cut(body: bytes, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    splitter = EventSplitter()
    found = [event for start, end in itertools.pairwise(places) for event in splitter.feed(body[start:end])]
    assert found + splitter.close() == reference(body)


@given(bodies())
def test_every_byte_may_come_alone(body: bytes) -> None:
    splitter = EventSplitter()
    found = [event for index in range(len(body)) for event in splitter.feed(body[index : index + 1])]
    assert found + splitter.close() == reference(body)


def test_an_event_is_handed_over_with_the_byte_that_completes_it() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\n") == [b"a"]
    assert splitter.feed(b"data: b\r\n\r") == []
    assert splitter.feed(b"\n") == [b"b"]
    assert splitter.feed(b": keep-alive\n\n\n\ndata:c\ndata:  d\n\n") == [b"c\n d"]


def test_a_last_event_without_its_blank_line_is_not_lost() -> None:
    for end in (b"", b"\n", b"\r", b"\r\n"):
        splitter = EventSplitter()
        assert splitter.feed(b"data: [DONE]" + end) == []
        assert splitter.close() == [b"[DONE]"]


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.load.sse.MAX_EVENT_BYTES", 100)
    splitter = EventSplitter()
    splitter.feed(b"x" * 100)
    with pytest.raises(ValueError, match="101 bytes without a line end"):
        splitter.feed(b"x")
