"""``json_body.parse_json`` in pieces: the same values, the same errors, a yield at least every millisecond or so.

The interpreter's parser is one call into C that holds the GIL to its end: 1.5 s for eight megabytes of empty objects,
on whichever thread. Here Python walks the structure and leaves to C what is short: one number or string, a run of
whole numbers, a piece of a long string. How many values there may be is bounded too, and with them the memory.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from json import decoder
from typing import Any, NoReturn

from octavo.core.errors import InvalidRequest, PromptTooLong
from octavo.core.limits import (
    MAX_JSON_DEPTH,
    MAX_JSON_NUMBERS,
    MAX_JSON_VALUES,
    MAX_NUMBER_CHARS,
    MAX_TEXT_CHARS,
)
from octavo.core.steps import Steps

#: Bytes that one call into C sees: 0.2 ms of a string, 0.1 ms of numbers.
STRING_PIECE = 1 << 16
NUMBERS_PIECE = 1 << 12
#: Values between two yields, about 0.3 ms.
VALUES_PER_STEP = 256

_SPACE = re.compile(rb"[ \t\n\r]*+")
_NUMBER = re.compile(rb"(-?(?:0|[1-9][0-9]*+))(\.[0-9]++)?([eE][-+]?[0-9]++)?")
_WHOLE_NUMBERS = re.compile(rb"(?:-?(?:0|[1-9][0-9]*+)[ \t\n\r]*+,[ \t\n\r]*+)++")
_ESCAPE = rb"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})"
_PLAIN_STRING = re.compile(rb'"([^"\\\x00-\x1f]*+)"')
_PIECE = re.compile(rb'(?:[^"\\\x00-\x1f]++|' + _ESCAPE + rb")*+")
_LAST_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[0-9a-fA-F]{4})\Z")
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89aAbB][0-9a-fA-F]{2}")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LITERALS = {b"n": (b"null", None), b"t": (b"true", True), b"f": (b"false", False)}
_CONSTANTS = (b"NaN", b"Infinity", b"-Infinity")
_MISSING: Any = object()
_scan_string: Callable[[str, int], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]


class _SyntaxError(Exception):
    """What the interpreter's parser says, and the byte that it says it of."""

    def __init__(self, message: str, at: int) -> None:
        self.message, self.at = message, at


class JsonReader:
    """One pass over one body.

    body:  UTF-8 without a byte order mark
    number: what a number that is not whole means; constant: what NaN and its like mean
    twice: called with the key that an object has twice
    """

    def __init__(
        self,
        body: bytes,
        *,
        number: Callable[[str], float],
        constant: Callable[[str], float],
        twice: Callable[[str], NoReturn],
    ) -> None:
        self._body = body
        self._number, self._constant, self._twice = number, constant, twice
        self._at = 0
        self._num_numbers = 0
        self._num_values = 0
        self._keys: dict[str, str] = {}  # equal keys are one object
        self.has_half_pair = False  # some string has half of a surrogate pair

    def read(self) -> Steps[Any]:
        """The value. Raises InvalidRequest, UnicodeDecodeError, ValueError for a number that is too long."""
        yield from self._check_utf8()
        try:
            return (yield from self._read())
        except _SyntaxError as error:
            where = yield from self._where(error.at)
            raise InvalidRequest(f"the body is not valid JSON: {error.message}: {where}") from None

    def _check_utf8(self) -> Steps[None]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        for start in range(0, len(self._body), STRING_PIECE):
            piece = self._body[start : start + STRING_PIECE]
            before = len(decoder.getstate()[0])
            try:
                decoder.decode(piece, start + STRING_PIECE >= len(self._body))
            except UnicodeDecodeError as error:
                at = start - before + error.start
                raise UnicodeDecodeError("utf-8", b"", at, at + 1, error.reason) from None
            yield

    def _where(self, at: int) -> Steps[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        position = line_start = num_lines = 0
        for start in range(0, at, STRING_PIECE):
            text = decoder.decode(self._body[start : min(start + STRING_PIECE, at)])
            if (last := text.rfind("\n")) >= 0:
                num_lines += text.count("\n")
                line_start = position + last + 1
            position += len(text)
            yield
        return f"line {num_lines + 1} column {position - line_start + 1} (char {position})"

    def _read(self) -> Steps[Any]:
        """A loop over values with the open containers on a stack: no recursion, so depth is ours to bound."""
        if self._body.startswith(codecs.BOM_UTF8):
            raise _SyntaxError("Unexpected UTF-8 BOM (decode using utf-8-sig)", 0)
        stack: list[tuple[Any, str, str | None]] = []  # (container, key of the value being read, key given twice)
        self._skip_space()
        num_steps = 0
        while True:
            num_steps += 1
            if num_steps % VALUES_PER_STEP == 0:
                yield
            first = self._body[self._at : self._at + 1]
            value: Any
            if first == b"{" or first == b"[":
                value = yield from self._open(stack)
                if value is _MISSING:
                    continue
            elif first == b'"':
                self._count_value()
                value = yield from self._string()
            else:
                value = self._scalar(first)
            # close what this value ends
            while stack:
                self._skip_space()
                container, key, twice = stack[-1]
                is_list = type(container) is list
                if is_list:
                    container.append(value)
                else:
                    if twice is None and key in container:
                        twice = key
                    container[key] = value
                following = self._body[self._at : self._at + 1]
                if following == b",":
                    stack[-1] = container, key, twice
                    yield from self._next(stack)
                    break
                if following != (b"]" if is_list else b"}"):
                    raise _SyntaxError("Expecting ',' delimiter", self._at)
                self._at += 1
                if twice is not None:
                    self._twice(twice)
                value = container
                stack.pop()
            else:
                self._skip_space()
                if self._at < len(self._body):
                    raise _SyntaxError("Extra data", self._at)
                return value

    def _open(self, stack: list[tuple[Any, str, str | None]]) -> Steps[Any]:
        """Begin an object or a list; an empty one is a value already."""
        is_list = self._body[self._at] == 0x5B
        if len(stack) >= MAX_JSON_DEPTH:
            raise RecursionError
        self._count_value()
        self._at += 1
        self._skip_space()
        if self._body[self._at : self._at + 1] == (b"]" if is_list else b"}"):
            self._at += 1
            return [] if is_list else {}
        if is_list:
            stack.append(([], "", None))
            yield from self._whole_numbers(stack[-1][0])
        else:
            stack.append(({}, (yield from self._key()), None))
        return _MISSING

    def _next(self, stack: list[tuple[Any, str, str | None]]) -> Steps[None]:
        """Past a comma."""
        comma = self._at
        self._at += 1
        self._skip_space()
        container, _, twice = stack[-1]
        closing = self._body[self._at : self._at + 1]
        if type(container) is list:
            if closing == b"]" and _NAMES_TRAILING_COMMAS:
                raise _SyntaxError("Illegal trailing comma before end of array", comma)
            yield from self._whole_numbers(container)
        else:
            if closing == b"}" and _NAMES_TRAILING_COMMAS:
                raise _SyntaxError("Illegal trailing comma before end of object", comma)
            stack[-1] = container, (yield from self._key()), twice

    def _key(self) -> Steps[str]:
        if self._body[self._at : self._at + 1] != b'"':
            raise _SyntaxError("Expecting property name enclosed in double quotes", self._at)
        self._count_value()
        key = yield from self._string()
        self._skip_space()
        if self._body[self._at : self._at + 1] != b":":
            raise _SyntaxError("Expecting ':' delimiter", self._at)
        self._at += 1
        self._skip_space()
        return self._keys.setdefault(key, key)

    def _whole_numbers(self, container: list[Any]) -> Steps[None]:
        """Whole numbers that are followed by commas, by the thousand."""
        while (run := _WHOLE_NUMBERS.match(self._body, self._at, self._at + NUMBERS_PIECE)) is not None:
            numbers = json.loads(b"[" + run[0].rstrip(b" \t\n\r,") + b"]")
            self._num_numbers += len(numbers) - 1
            self._count_number()
            container.extend(numbers)
            self._at = run.end()
            self._skip_space()
            yield
        if container and self._body[self._at : self._at + 1] == b"]" and _NAMES_TRAILING_COMMAS:
            comma = self._body.rindex(b",", 0, self._at)
            raise _SyntaxError("Illegal trailing comma before end of array", comma)

    def _scalar(self, first: bytes) -> Any:
        at = self._at
        if (literal := _LITERALS.get(first)) is not None and self._body.startswith(literal[0], at):
            self._count_value()
            self._at += len(literal[0])
            return literal[1]
        number = _NUMBER.match(self._body, at, at + 2 * MAX_NUMBER_CHARS)
        if number is None:
            for name in _CONSTANTS:
                if self._body.startswith(name, at):
                    return self._constant(name.decode())
            raise _SyntaxError("Expecting value", at)
        self._at = number.end()
        digits = number[0].decode()
        if len(digits) > MAX_NUMBER_CHARS + (first == b"-"):
            raise ValueError("too many digits")
        if number[2] is None and number[3] is None:
            self._count_number()
            return int(digits)
        self._count_value()
        return self._number(digits)

    def _string(self) -> Steps[str]:
        """The string that begins here, and the place after it."""
        begin = self._at
        plain = _PLAIN_STRING.match(self._body, begin, begin + STRING_PIECE)
        if plain is not None:
            self._at = plain.end()
            return plain[1].decode()
        pieces: list[str] = []
        at, num_chars = begin + 1, 0
        while (end := self._end_of_piece(at)) > at:
            piece = self._body[at:end].decode()
            if "\\" in piece:
                piece = _scan_string(f'{piece}"', 0)[0]
                if _SURROGATE.search(piece):
                    self.has_half_pair = True
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > MAX_TEXT_CHARS:
                raise PromptTooLong(f"the body has a string of more than {MAX_TEXT_CHARS} characters; shorten it")
            at = end
            if self._body[at : at + 1] == b'"':
                self._at = at + 1
                return "".join(pieces)
            yield
        raise self._bad_string(begin, at)

    def _end_of_piece(self, at: int) -> int:
        """Where a piece of a string that begins at ``at`` may end: between characters, not inside a surrogate pair."""
        body, stop = self._body, at + STRING_PIECE
        found = _PIECE.match(body, at, stop)
        assert found is not None
        end = found.end()
        if end >= len(body) or end + 12 < stop:
            return end
        while body[end] & 0xC0 == 0x80:
            end -= 1
        if end - 6 > at and _HIGH_SURROGATE.match(body, end - 6):
            num_backslashes = 0
            while body[end - 6 - num_backslashes] == 0x5C and end - 6 - num_backslashes >= at:
                num_backslashes += 1
            if num_backslashes % 2:
                return end - 6
        return end

    def _bad_string(self, begin: int, at: int) -> _SyntaxError:
        """What is wrong with the string from ``begin`` that cannot go on at ``at``."""
        if at >= len(self._body):
            if _LAST_ESCAPE.search(self._body, max(begin, at - STRING_PIECE)):
                return _SyntaxError("Invalid \\uXXXX escape", at - 5)  # it wants to see one character more
            return _SyntaxError("Unterminated string starting at", begin)
        if self._body[at] != 0x5C:
            return _SyntaxError("Invalid control character at", at)
        rest = self._body[at : at + 12].decode(errors="ignore")  # the escape, and what the parser may look at beyond it
        try:
            _scan_string(rest, 0)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated"):
                return _SyntaxError(error.msg, begin)
            return _SyntaxError(error.msg, at + len(rest[: error.pos].encode()))
        raise AssertionError(rest)

    def _skip_space(self) -> None:
        while self._body[self._at : self._at + 1] in (b" ", b"\n", b"\t", b"\r"):
            found = _SPACE.match(self._body, self._at, self._at + STRING_PIECE)
            assert found is not None
            self._at = found.end()

    def _count_number(self) -> None:
        self._num_numbers += 1
        if self._num_numbers > MAX_JSON_NUMBERS:
            raise InvalidRequest(f"the body has more than {MAX_JSON_NUMBERS} whole numbers; send less in one request")

    def _count_value(self) -> None:
        self._num_values += 1
        if self._num_values > MAX_JSON_VALUES:
            raise InvalidRequest(
                f"the body has more than {MAX_JSON_VALUES} values besides whole numbers; send less in one request"
            )


def discard(value: Any) -> Steps[None]:
    """Take a value apart: freeing a million numbers in one go holds the GIL for 10 ms."""
    stack = [value]
    del value
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
            item.clear()
        elif isinstance(item, list):
            while item:
                stack += [inner for inner in item[-VALUES_PER_STEP:] if isinstance(inner, list | dict)]
                del item[-VALUES_PER_STEP:]
                yield
        del item


def _names_trailing_commas() -> bool:
    """Whether this Python's parser says "Illegal trailing comma" (from 3.13 on)."""
    try:
        json.loads("[1,]")
    except json.JSONDecodeError as error:
        return error.msg.startswith("Illegal")
    raise AssertionError


_NAMES_TRAILING_COMMAS = _names_trailing_commas()
