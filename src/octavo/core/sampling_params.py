"""How one sequence draws its tokens and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal, NamedTuple, get_type_hints

from octavo.core.errors import InvalidRequest
from octavo.core.limits import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID_LIST,
)


class AscendingIds(tuple[int, ...]):
    """Token ids that are known to be whole numbers in ascending order: of a long list only the ends are looked at."""

    __slots__ = ()


Stage = Literal["masks", "penalties", "shape", "draw", "stopping", "reports"]


class Range(NamedTuple):
    """What a number may be."""

    holds: Callable[[float], bool]
    words: str


@dataclass(frozen=True, slots=True)
class Stated:
    """What there is to know of a field besides its name, type and default."""

    stage: Stage
    doc: str
    range: Range | None = None  # None: no number
    in_http: bool = True  # under the same name; else an endpoint has its own way to say it


def between(low: float, high: float) -> Range:
    """Both included."""
    return Range(lambda value: low <= value <= high, f"from {low:g} to {high:g}")


def above(low: float, high: float) -> Range:
    """``low`` left out."""
    return Range(lambda value: low < value <= high, f"above {low:g}, at most {high:g}")


def whole(low: int, high: int, *, named: str | None = None, note: str = "") -> Range:
    """Both included. named: ``low`` with what it means; note: what another value means."""
    holds = lambda value: isinstance(value, int) and low <= value <= high  # noqa: E731
    return Range(holds, f"a whole number from {named or low} to {high}{note}")


def _at(stage: Stage, default: Any, doc: str, range_: Range | None = None, *, in_http: bool = True) -> Any:
    """A field of the dataclass; its type is in its annotation."""
    return field(default=default, metadata={"stated": Stated(stage, doc, range_, in_http)})


_LARGE = 2**31 - 1
_LAST_N = whole(-1, _LARGE, named="-1 (all)", note="; 0 is off")


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class SamplingParams:
    """The parameters of one draw, in the order in which they act, then those of stopping.

    Order of a draw: logit bias and masks, penalties (repetition, presence, frequency, DRY), temperature,
    top-k, typical, top-p, min-p, XTC, draw. ``temperature == 0`` takes the arg-max after the penalties.
    A value that switches a stage off is its default. Out-of-range values raise ``InvalidRequest`` naming the field.
    Where a tuple is wanted a list will do, for ``stop`` one string, for ``logit_bias`` a mapping.

    Each field is stated here alone: the HTTP schemas, docs/sampling.md and the copy between them come from this.
    """

    logit_bias: tuple[tuple[int, float], ...] = _at("masks", (), "Token id to what is added to its logit, -100 to 100.")
    allowed_token_ids: tuple[int, ...] | None = _at("masks", None, "The only tokens that may be drawn.")
    bad_words_token_ids: tuple[tuple[int, ...], ...] = _at("masks", (), "Sequences never completed.", in_http=False)
    repetition_penalty: float = _at("penalties", 1.0, "Divides logits above 0, multiplies others.", above(0, 100))
    presence_penalty: float = _at("penalties", 0.0, "Subtracted from tokens that the output has.", between(-2, 2))
    frequency_penalty: float = _at("penalties", 0.0, "Subtracted for each time that it has it.", between(-2, 2))
    dry_multiplier: float = _at("penalties", 0.0, "DRY: subtracts this * base ** (repeat - allowed).", between(0, 100))
    dry_base: float = _at("penalties", 1.75, "DRY.", between(1, 10))
    dry_allowed_length: int = _at("penalties", 2, "DRY: repeats up to this length are free.", whole(1, 1024))
    dry_penalty_last_n: int = _at("penalties", -1, "DRY: tokens looked back over.", _LAST_N)
    dry_sequence_breaker_ids: tuple[int, ...] = _at("penalties", (), "DRY: no repeat reaches across.", in_http=False)
    temperature: float = _at("shape", 1.0, "Divides the logits; 0 takes the likeliest token.", between(0, 100))
    top_k: int = _at("shape", 0, "Only so many of the likeliest tokens.", whole(0, _LARGE, named="0 (off)"))
    typical_p: float = _at("shape", 1.0, "Only the most typical tokens, up to this mass.", above(0, 1))
    top_p: float = _at("shape", 1.0, "Only the likeliest tokens, up to this mass.", above(0, 1))
    min_p: float = _at("shape", 0.0, "Only tokens at least this likely, the likeliest being 1.", between(0, 1))
    xtc_probability: float = _at("shape", 0.0, "XTC: how often all above the threshold but the last go.", between(0, 1))
    xtc_threshold: float = _at("shape", 0.1, "XTC.", between(0, 1))
    seed: int | None = _at("draw", None, "None, -1: a new one each time, kept.", whole(-(2**63), 2**64 - 1))
    max_tokens: int | None = _at("stopping", None, "None: what the context leaves.", whole(0, _LARGE), in_http=False)
    min_tokens: int = _at("stopping", 0, "Before so many, nothing but the context ends it.", whole(0, _LARGE))
    stop: tuple[str, ...] = _at("stopping", (), "Texts that end the answer, and are not part of it.")
    stop_token_ids: tuple[int, ...] = _at("stopping", (), "Tokens that end the answer, besides the model's own.")
    include_stop_str_in_output: bool = _at("stopping", False, "Leave the text that ended the answer in it.")
    ignore_eos: bool = _at("stopping", False, "Go on after the model's own end.")
    logprobs: int | None = _at(
        "reports", None, "Alternatives told of each token.", whole(0, MAX_LOGPROBS), in_http=False
    )
    prompt_logprobs: int | None = _at(
        "reports", None, "The same of the prompt's.", whole(0, MAX_LOGPROBS), in_http=False
    )
    # (lowest, highest) token id in all the lists; found once, since n choices of many prompts each ask
    _id_range: tuple[int, int] = field(default=(0, 0), init=False, repr=False, compare=False)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether a draw looks at the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or (self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0)
            or bool(self.bad_words_token_ids)
        )

    @property
    def masks(self) -> tuple[str, ...]:
        """The fields set that forbid tokens, by the names that a caller knows."""
        given = {
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words_token_ids),
            "min_tokens": self.min_tokens > 0,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    def __post_init__(self) -> None:
        for name in _TUPLES:
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        for name, (holds, words) in _RANGES:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and holds(value)):
                raise InvalidRequest(f"{name} is {value!r} but must be {words}", param=name)
        if self.seed == -1:  # as in vLLM and llama.cpp; other negative numbers are seeds
            object.__setattr__(self, "seed", None)
        self._check_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens} but max_tokens is only {self.max_tokens}", param="min_tokens"
            )

    def _check_lists(self) -> None:
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS}", param="stop")
        for stop in self.stop:
            if not isinstance(stop, str):
                raise InvalidRequest(f"stop has {stop!r:.80}, which is no string", param="stop")
            if not 1 <= len(stop) <= MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"a stop string has {len(stop)} characters but must have 1 to {MAX_STOP_STRING_CHARS}", param="stop"
                )
        # not dry_sequence_breaker_ids: a server bounds the strings they come from, and " " is in half of all tokens
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            length = len(getattr(self, name) or ())
            if length > MAX_TOKEN_ID_LIST:
                raise InvalidRequest(f"{name} has {length} entries; at most {MAX_TOKEN_ID_LIST}", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids is empty; leave it out to allow all", param="allowed_token_ids")
        words = self.bad_words_token_ids
        if len(words) > MAX_BAD_WORDS or any(not 1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words):
            raise InvalidRequest(
                f"bad_words takes up to {MAX_BAD_WORDS} words of 1 to {MAX_BAD_WORD_TOKENS} tokens each",
                param="bad_words",
            )
        for _, bias in self.logit_bias:
            if not (_is_number(bias) and -100.0 <= bias <= 100.0):
                raise InvalidRequest(f"logit_bias has {bias!r} but takes -100 to 100", param="logit_bias")
        lowest = highest = 0
        for name, ids in self._token_ids():
            if type(ids) is not AscendingIds and set(map(type, ids)) - {int}:
                for token in ids:
                    if not isinstance(token, int):
                        raise InvalidRequest(f"{name} has {token!r:.80}, which is no token id", param=name)
            if ids:
                ends = (ids[0], ids[-1]) if type(ids) is AscendingIds else ids
                lowest, highest = min(lowest, min(ends)), max(highest, max(ends))
        object.__setattr__(self, "_id_range", (lowest, highest))
        breakers = self.dry_sequence_breaker_ids
        if type(breakers) is not AscendingIds:
            object.__setattr__(self, "dry_sequence_breaker_ids", AscendingIds(sorted(set(breakers))))
        self._merge_bias()

    def _merge_bias(self) -> None:
        """What one token is given several times adds up."""
        merged: dict[int, float] = {}
        for token, bias in self.logit_bias:
            merged[token] = merged.get(token, 0.0) + bias
        if len(merged) < len(self.logit_bias):
            object.__setattr__(self, "logit_bias", tuple(merged.items()))

    def _token_ids(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Every list of token ids, by the name that a caller knows."""
        return (
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
            ("dry_sequence_breakers", self.dry_sequence_breaker_ids),
            ("bad_words", tuple(chain.from_iterable(self.bad_words_token_ids))),
        )

    def check_token_ids(self, vocab_size: int) -> None:
        """Raise ``InvalidRequest`` if a token id is outside ``[0, vocab_size)``: none may reach a kernel."""
        if self._id_range[0] >= 0 and self._id_range[1] < vocab_size:
            return
        for name, ids in self._token_ids():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} has token id {token} but the vocabulary has {vocab_size} tokens", param=name
                    )


_TUPLES = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "dry_sequence_breaker_ids",
    "stop",
    "stop_token_ids",
)


def _as_tuple(name: str, value: Any) -> Any:
    """``value`` as the tuple that the field wants, however it was written. Raises ``InvalidRequest``."""
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "logit_bias" and isinstance(value, Mapping):
        return tuple(value.items())
    if value is None and name == "allowed_token_ids":
        return None
    if not isinstance(value, tuple | list):
        raise InvalidRequest(f"{name} is {value!r:.80} but must be a list", param=name)
    if name == "bad_words_token_ids":
        if not all(isinstance(word, tuple | list) for word in value):
            raise InvalidRequest(f"{name} is {value!r:.80} but must be a list of lists of token ids", param=name)
        return tuple(map(tuple, value))
    return value if isinstance(value, tuple) else tuple(value)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def stated_fields() -> dict[str, tuple[Any, Any, Stated]]:
    """Name -> (type, default, what else is stated), in the order in which they act."""
    hints = get_type_hints(SamplingParams)
    return {
        one.name: (hints[one.name], one.default, one.metadata["stated"])
        for one in fields(SamplingParams)
        if "stated" in one.metadata
    }


_RANGES: tuple[tuple[str, Range], ...] = tuple(
    (name, stated.range) for name, (_, _, stated) in stated_fields().items() if stated.range is not None
)
