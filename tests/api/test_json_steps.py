"""The parser that works in pieces against the one that works at once: the same values, the same words of complaint."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holding import longest_hold, steps_of
from octavo.api import json_body, json_steps
from octavo.api.json_body import is_small, parse_json, parse_json_steps
from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.limits import (
    MAX_BODY_BYTES,
    MAX_JSON_DEPTH,
    MAX_JSON_NUMBERS,
    MAX_JSON_VALUES,
    MAX_NUMBER_CHARS,
    MAX_TEXT_CHARS,
)
from octavo.core.steps import Steps, finish

scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=6),
    max_leaves=30,
)
documents = st.dictionaries(st.text(max_size=5), values, max_size=5)
PIECES = (
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\u", b"\\ud83d", b"\\ude00", b"\\udc00", b"d83d", b"\xff",
    b"\xc3", b"\xa9", b"\xed\xa0\x80", b"-", b"0", b"01", b"1.", b"1e5", b"1e999", b"-0", b"NaN", b"-Infinity",
    b"Infinity", b"null", b"tru", b"\x00", b"\n", b"\r\n", b" \t", b'"a":1,', b'"a"', b"1,2 ,3,", b"[]",
    b"{}", b"\\n", b"9" * 4301, b"-" + b"9" * 4300, b"0." + b"9" * 4299, b"\xef\xbb\xbf", b"\\\\",
)  # fmt: skip


def outcome(body: bytes, *, in_steps: bool) -> Any:
    try:
        value = finish(parse_json_steps(body)) if in_steps else parse_json(body)
    except InvalidRequest as error:
        return str(error), error.param
    return value


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down."""
    return left == right and repr(left) == repr(right)


@pytest.fixture(params=[1 << 16, 17], ids=lambda size: f"pieces of {size}")
def piece_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(json_steps, "STRING_PIECE", request.param)
    monkeypatch.setattr(json_steps, "NUMBERS_PIECE", request.param)
    return int(request.param)


@pytest.mark.usefixtures("piece_size")
@settings(max_examples=50)
@given(document=documents, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]))
def test_documents_have_the_same_value(document: dict[str, Any], ascii_only: bool, indent: int | None) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode()
    assert same(outcome(body, in_steps=True), document)


@pytest.mark.usefixtures("piece_size")
@given(document=documents, seed=st.integers(0, 2**32), ascii_only=st.booleans())
def test_damaged_documents_have_the_same_value_or_error(document: dict[str, Any], seed: int, ascii_only: bool) -> None:
    body = bytearray(json.dumps(document, ensure_ascii=ascii_only).encode())
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randint(0, len(body))
        body[at : at + draw.choice((0, 0, 1, 2))] = draw.choice((b"", *PIECES))
    assert same(outcome(bytes(body), in_steps=True), outcome(bytes(body), in_steps=False))


@pytest.mark.usefixtures("piece_size")
@given(parts=st.lists(st.sampled_from(PIECES), max_size=12))
def test_scraps_have_the_same_value_or_error(parts: list[bytes]) -> None:
    for body in (b"".join(parts), b'{"a":' + b"".join(parts) + b"}", b'{"a":"' + b"".join(parts) + b'"}'):
        assert same(outcome(body, in_steps=True), outcome(body, in_steps=False))


@pytest.mark.parametrize("length", range(8, 22))
@pytest.mark.parametrize(
    "tail", ["\\ud83d\\ude00", "\\\\ud83d\\u0041", "é", "😀", "\\ud83d", "\\ud83d\\u0041", "\\u00", "\n"]
)
def test_no_cut_of_a_long_string_shows(monkeypatch: pytest.MonkeyPatch, length: int, tail: str) -> None:
    monkeypatch.setattr(json_steps, "STRING_PIECE", 20)
    body = ('{"a":"' + "x" * length + tail + 'rest"}').encode()
    assert same(outcome(body, in_steps=True), outcome(body, in_steps=False))


def test_a_byte_order_mark_is_skipped_once() -> None:
    body = b'\xef\xbb\xbf{"a": 1}'
    assert outcome(body, in_steps=True) == outcome(body, in_steps=False) == {"a": 1}
    assert "not valid JSON" in outcome(b"\xef\xbb\xbf" + body, in_steps=True)[0]


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH, MAX_JSON_DEPTH + 1])
def test_depth_is_bounded(depth: int) -> None:
    body = b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"
    assert is_small(body) == (depth <= MAX_JSON_DEPTH)
    if depth <= MAX_JSON_DEPTH:
        assert outcome(body, in_steps=True) == outcome(body, in_steps=False)
    else:
        assert "nested too deeply" in outcome(body, in_steps=True)[0]


def test_numbers_of_values_are_bounded_and_the_work_ends_there() -> None:
    for item, limit in ((b"{}", MAX_JSON_VALUES), (b"1.5", MAX_JSON_VALUES), (b"1", MAX_JSON_NUMBERS)):
        outcome_, seconds = steps_of(parse_json_steps(b'{"a":[' + item + (b"," + item) * (limit + 10) + b"]}"))
        assert isinstance(outcome_, InvalidRequest)
        assert str(limit) in str(outcome_)
        assert len(seconds) > 100  # it did not come in one piece
    ids = b"[" + b",".join(b"%d" % i for i in range(200_000)) + b"]"
    assert finish(parse_json_steps(b'{"a":' + ids + b"}"))["a"] == list(range(200_000))


def test_a_string_is_at_most_as_long_as_a_prompt_may_be() -> None:
    with pytest.raises(PromptTooLong, match=str(MAX_TEXT_CHARS)):
        finish(parse_json_steps(b'{"a":"' + b"x" * (MAX_TEXT_CHARS + 1) + b'"}'))
    assert len(finish(parse_json_steps(b'{"a":"' + b"x" * MAX_TEXT_CHARS + b'"}'))["a"]) == MAX_TEXT_CHARS


COSTLY = {
    "numbers": b'{"a":[' + b"1234567," * (1 << 16) + b"1]}",
    "letters": b'{"a":"' + b"x" * (MAX_TEXT_CHARS - 1) + b'"}',
    "line breaks": b'{"a":"' + b"\\n" * (MAX_TEXT_CHARS - 1) + b'"}',
    "surrogate pairs": b'{"a":"' + b"\\ud83d\\ude00" * (MAX_BODY_BYTES // 16) + b'"}',
    "one wide character": b'{"a":"' + b"x" * (MAX_TEXT_CHARS - 2) + "😀".encode() + b'"}',
    "space": b'{"a":' + b" " * (MAX_BODY_BYTES - 10) + b"1}",
    "long numbers": b'{"a":[' + (b"1." + b"7" * (MAX_NUMBER_CHARS - 2) + b",") * 300 + b"1]}",
    "bad byte at the end": b'{"a":"' + b"x" * (MAX_BODY_BYTES - 10) + b"\xff",
    "objects": b'{"a":[' + b"{}," * 3000 + b"1]}",
    "pairs": b'{"a":[' + b'{"b":{"c":0.5}},' * 800 + b"1]}",
    "fields": b"{" + b",".join(b'"k%d":1' % i for i in range(3000)) + b"}",
}


@pytest.mark.parametrize("kind", COSTLY)
def test_no_call_holds_the_gil_while_a_large_body_is_read_and_discarded(kind: str) -> None:
    def steps() -> Steps[None]:
        value = yield from parse_json_steps(COSTLY[kind])
        yield from json_steps.discard(value)

    held_s, where = longest_hold(lambda: steps_of(steps()))
    assert held_s < 0.005, where


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":[' + b"{}," * (json_body.SMALL_BODY_CONTAINERS - 3) + b"{}]}",
        b'{"a":[' + b"1234567," * (json_body.SMALL_BODY_ITEMS - 2) + b"1]}",
        b'{"a":"' + b"\\n" * (json_body.SMALL_BODY_BYTES // 2 - 6) + b'"}',
        b'{"a":"' + b"\\u00e9" * (json_body.SMALL_BODY_BYTES // 6 - 6) + b'"}',
    ],
    ids=["objects", "numbers", "line breaks", "escapes"],
)
def test_what_is_read_on_the_event_loop_takes_little(body: bytes) -> None:
    assert is_small(body)
    held_s, where = longest_hold(lambda: parse_json(body))
    assert held_s < 0.002, where


def test_what_is_larger_is_not_read_on_the_event_loop() -> None:
    assert not is_small(b'{"a":[' + b"{}," * json_body.SMALL_BODY_CONTAINERS + b"{}]}")
    assert not is_small(b'{"a":[' + b"1," * json_body.SMALL_BODY_ITEMS + b"1]}")
    assert not is_small(b'{"a":"' + b"x" * json_body.SMALL_BODY_BYTES + b'"}')
