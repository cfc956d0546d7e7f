"""Log-probabilities on the wire: OpenAI's two formats and vLLM's ``prompt_logprobs``, as pieces of JSON text.

Everything here becomes text at once, token by token, as tokens arrive: a long answer with 20 alternatives per token
would otherwise block the event loop while it is serialised at the end.

A token that is only part of a character is written as OpenAI does: ``bytes:\\xe4\\xbd``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from json.encoder import encode_basestring
from typing import NamedTuple

from octavo.api.engine_protocol import TokenTable
from octavo.core.plan import SampledToken
from octavo.core.steps import Steps

#: JSON has no -inf; OpenAI writes this for "impossible".
LOWEST = -9999.0
#: Characters of white space by which it is decided whether a special token has taken them.
SPACE_COMPARED = 64
#: Tokens of a prompt whose places in its text are found between two yields: half a millisecond.
OFFSETS_PER_STEP = 256
#: Items of a list that are joined in one go: tokens with twenty alternatives have some 1,500 characters each.
JOINED_ITEMS = 64

_SPACES, _WHITE_SPACE = re.compile(" *"), re.compile(r"\s*")
_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def json_string(text: str) -> str:
    """``text`` as a JSON string: UTF-8 stays, except what some client's ``splitlines`` takes for the end of a line."""
    quoted = encode_basestring(text)
    return quoted if quoted.isascii() else quoted.translate(_LINE_BREAKS)


def comma_joined(items: Iterable[str]) -> Iterator[str]:
    """``",".join(items)`` in pieces of a few items; none of them is empty."""
    items, comma = iter(items), ""
    while piece := ",".join(islice(items, JOINED_ITEMS)):
        yield comma + piece
        comma = ","


def json_number(logprob: float | None) -> str:
    """A log-probability, or null."""
    return "null" if logprob is None else repr(max(LOWEST, min(logprob, 0.0)))


class TokenText(NamedTuple):
    """One token, ready to be put into JSON."""

    raw: bytes
    is_control: bool  # a marker, which adds nothing to the text
    token: str  # JSON string
    bytes: str  # JSON list of its bytes; null for a control token, which has no text


class TokenTexts:
    """Token id -> TokenText, remembered."""

    def __init__(self, tokenizer: TokenTable) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, TokenText] = {}  # at most the vocabulary

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._make(token_id)
        return found

    def _make(self, token_id: int) -> TokenText:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            name = raw.decode("utf-8")
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        if self._tokenizer.is_control(token_id):
            return TokenText(raw, True, json_string(name), "null")
        return TokenText(raw, False, json_string(name), f"[{','.join(map(str, raw))}]")


def chat_logprobs(tokens: Iterable[SampledToken], texts: TokenTexts) -> list[str]:
    """Items of ``choices[].logprobs.content``: one JSON object per token.

    ``bytes`` are the token's own bytes, so that those of consecutive tokens can be joined and then decoded.
    """
    return [
        f'{{{_chat_entry(token.token_id, token.logprob, texts)},"top_logprobs":['
        + ",".join(f"{{{_chat_entry(token_id, logprob, texts)}}}" for token_id, logprob in token.top)
        + "]}"
        for token in tokens
    ]


def _chat_entry(token_id: int, logprob: float | None, texts: TokenTexts) -> str:
    text = texts[token_id]
    return f'"token":{text.token},"logprob":{json_number(logprob)},"bytes":{text.bytes}'


class CompletionLogprobs:
    """``choices[].logprobs`` of a completion: parallel arrays, told in parts.

    ``text_offset`` counts characters of the choice's whole text (prompt included, if it is echoed) before the token; a
    token inside a character has the offset of that character.
    """

    def __init__(self, texts: TokenTexts, *, start: int = 0) -> None:
        """start: where the answer begins in the choice's text: behind the prompt, if it is echoed."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = start
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[str] = []
        self._top: list[str] = []
        self._offsets: list[str] = []

    def add(self, token: SampledToken, *, num_top: int, offset: int | None = None) -> None:
        """Append one token.

        num_top: alternatives asked for; the token itself comes on top of them
        offset:  of a token of the prompt (``prompt_offsets``); None for the answer's next
        """
        text = self._texts[token.token_id]
        self._tokens.append(text.token)
        self._logprobs.append(json_number(token.logprob))
        self._offsets.append(str(self._offset if offset is None else offset))
        if offset is None and not text.is_control:
            self._offset += len(self._decoder.decode(text.raw))
        if num_top == 0 or token.logprob is None:  # the first token of a prompt has no logprob
            self._top.append("null")
            return
        # By text, the likeliest first; should two ids have one text, it keeps the likelier.
        top: dict[str, str] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            top.setdefault(self._texts[token_id].token, json_number(logprob))
        self._top.append("{" + ",".join(f"{name}:{logprob}" for name, logprob in top.items()) + "}")

    def take_pieces(self) -> Iterator[str]:
        """The JSON object of what was added since the last call, in pieces."""
        arrays = (self._tokens, self._logprobs, self._top, self._offsets)
        self._clear()
        opening = "{"
        for name, array in zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), arrays, strict=True):
            yield f'{opening}"{name}":['
            yield from comma_joined(array)
            opening = "],"
        yield "]}"


def prompt_offsets(tokens: TokenTable, prompt: Sequence[int], text: str, *, typed: bool) -> Steps[list[int]]:
    """Where in ``text``, the echo of a prompt, each of its tokens begins; see ``CompletionLogprobs``.

    typed: ``text`` is what the client wrote and the tokens were made from. Control tokens but BOS are then written out
           in it, and what a SentencePiece tokenizer put in is not there: a space before each piece between special
           tokens. Otherwise ``text`` is ``tokens.decode(prompt)``: no control tokens, and without its first space.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    at, added = 0, b" " if tokens.adds_space_prefix else b""  # what a piece that begins here has before it
    inside_spaces = False  # a run of them has been counted where it began
    for index, token_id in enumerate(prompt):
        if index % OFFSETS_PER_STEP == 0:
            yield
        raw = tokens.token_bytes(token_id)
        if tokens.is_control(token_id):
            start, at = _control_span(tokens, prompt, index, text, at) if typed else (at, at)
            offsets.append(start)
            inside_spaces = False
            continue
        if typed and not inside_spaces and text[at : at + 1].isspace() and not decoder.getstate()[0]:
            at = _behind_swallowed(tokens, prompt, index, text, at)
        offsets.append(at)
        if added and raw.startswith(added) and not inside_spaces:
            num_written = _SPACES.match(text, at).end() - at  # type: ignore[union-attr]  # it matches anything
            if not typed or _num_spaces(tokens, prompt, index) > num_written:
                at -= 1  # for the space that counts in ``raw`` alone
        if raw:
            inside_spaces = raw.strip(b" ") == b""
            added = added if typed else b""
        at = min(at + len(decoder.decode(raw)), len(text))
    return offsets


def _control_span(tokens: TokenTable, prompt: Sequence[int], index: int, text: str, at: int) -> tuple[int, int]:
    """Start and end of a control token in a typed text, behind white space that it may have taken.

    Not written out are a BOS that the tokenizer put in front, and the token that stands for an unknown character.
    """
    name = tokens.token_bytes(prompt[index]).decode("utf-8", "replace")
    if text.startswith(name, at):
        return at, at + len(name)
    behind_space = _WHITE_SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anything
    if text.startswith(name, behind_space) and (index > 0 or _num_spaces(tokens, prompt, 1) == 0):
        return behind_space, behind_space + len(name)
    return at, min(at + min(index, 1), len(text))


def _behind_swallowed(tokens: TokenTable, prompt: Sequence[int], index: int, text: str, at: int) -> int:
    """``at``, or behind the white space there, if a special token has taken it: the tokens from ``index`` on lack it.

    A single space is taken for the token's own where that begins with one: the addition of a SentencePiece tokenizer.
    """
    written = _leading_space(text[at : at + SPACE_COMPARED])
    found = _leading_space_of(tokens, prompt, index)
    if found.startswith(written) or (written != " " and found.startswith(f" {written}")):
        return at
    return _WHITE_SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches anything


def _leading_space_of(tokens: TokenTable, prompt: Sequence[int], index: int) -> str:
    """The white space that the tokens from ``index`` on begin with, or as much of it as is compared."""
    decode = codecs.getincrementaldecoder("utf-8")("ignore").decode
    found = ""
    for position in range(index, len(prompt)):
        token_id = prompt[position]
        text = "" if tokens.is_control(token_id) else decode(tokens.token_bytes(token_id))
        found += _leading_space(text)
        if text.strip() or tokens.is_control(token_id) or len(found) > SPACE_COMPARED:
            break
    return found


def _leading_space(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _num_spaces(tokens: TokenTable, prompt: Sequence[int], index: int) -> int:
    """How many spaces the tokens from ``index`` on begin with."""
    num_spaces = 0
    for position in range(index, len(prompt)):
        token_id = prompt[position]
        raw = b"" if tokens.is_control(token_id) else tokens.token_bytes(token_id)
        num_leading = len(raw) - len(raw.lstrip(b" "))
        num_spaces += num_leading
        if num_leading < len(raw) or not raw:
            break
    return num_spaces


def prompt_logprobs(tokens: Iterable[SampledToken], texts: TokenTexts) -> list[str]:
    """Items of vLLM's ``prompt_logprobs``, ``{token id: {logprob, rank, decoded_token}}``; its first item is null.

    tokens: of prompt positions 1, 2, ...  ``rank`` counts from 1 and is null where it is beyond what was asked for.
    """
    found = []
    for token in tokens:
        ranked = {token_id: (logprob, str(rank)) for rank, (token_id, logprob) in enumerate(token.top, 1)}
        entries = {token.token_id: ranked.get(token.token_id, (token.logprob, "null"))} | ranked
        found.append(
            "{"
            + ",".join(
                f'"{token_id}":{{"logprob":{json_number(logprob)},"rank":{rank},"decoded_token":{texts[token_id].token}}}'
                for token_id, (logprob, rank) in entries.items()
            )
            + "}"
        )
    return found
