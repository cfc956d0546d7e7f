"""How one sequence draws its tokens and when it stops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

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


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class SamplingParams:
    """The parameters of one draw, in the order in which they act, then those of stopping.

    Order of a draw: logit bias and masks, penalties (repetition, presence, frequency, DRY), temperature,
    top-k, typical, top-p, min-p, XTC, draw. ``temperature == 0`` takes the arg-max after the penalties.
    A value that switches a stage off is its default. Out-of-range values raise ``InvalidRequest`` naming the field.
    Where a tuple is wanted a list will do, for ``stop`` one string, for ``logit_bias`` a mapping.
    """

    # masks: act on the raw logits
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), -100..100
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must never be completed
    # penalties over the tokens known so far
    repetition_penalty: float = 1.0  # divides positive, multiplies negative logits of prompt and output tokens
    presence_penalty: float = 0.0  # subtracted once per distinct output token
    frequency_penalty: float = 0.0  # subtracted per occurrence in the output
    dry_multiplier: float = 0.0  # DRY: multiplier * base ** (match_length - allowed_length)
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1  # tokens looked back over; -1: all, 0: off
    dry_sequence_breaker_ids: tuple[int, ...] = ()  # tokens that a repeat never reaches across; kept in ascending order
    # shape
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: int | None = None  # None or -1: drawn from the OS at submission and kept
    # stopping
    max_tokens: int | None = None  # None: what is left of the context
    min_tokens: int = 0  # stop tokens are masked before this many
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # reports
    logprobs: int | None = None  # None: none; k: the drawn token's and the k likeliest, natural log
    prompt_logprobs: int | None = None
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
        for name, ok, wanted in _RANGES:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and ok(value)):
                raise InvalidRequest(f"{name} is {value!r} but must be {wanted}", param=name)
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


def _whole(low: int, high: int) -> Callable[[float], bool]:
    return lambda value: isinstance(value, int) and low <= value <= high


_LARGE = 2**31 - 1
_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("repetition_penalty", lambda v: 0.0 < v <= 100.0, "above 0, at most 100"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "from -2 to 2"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "from -2 to 2"),
    ("dry_multiplier", lambda v: 0.0 <= v <= 100.0, "from 0 to 100"),
    ("dry_base", lambda v: 1.0 <= v <= 10.0, "from 1 to 10"),
    ("dry_allowed_length", _whole(1, 1024), "a whole number from 1 to 1024"),
    ("dry_penalty_last_n", _whole(-1, _LARGE), f"a whole number from -1 (all) to {_LARGE}; 0 is off"),
    ("temperature", lambda v: 0.0 <= v <= 100.0, "from 0 to 100"),
    ("top_k", _whole(0, _LARGE), f"a whole number from 0 (off) to {_LARGE}"),
    ("typical_p", lambda v: 0.0 < v <= 1.0, "above 0, at most 1"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "above 0, at most 1"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "from 0 to 1"),
    ("xtc_probability", lambda v: 0.0 <= v <= 1.0, "from 0 to 1"),
    ("xtc_threshold", lambda v: 0.0 <= v <= 1.0, "from 0 to 1"),
    ("seed", _whole(-(2**63), 2**64 - 1), "a whole number of 64 bits"),
    ("max_tokens", _whole(0, _LARGE), f"a whole number from 0 to {_LARGE}"),
    ("min_tokens", _whole(0, _LARGE), f"a whole number from 0 to {_LARGE}"),
    ("logprobs", _whole(0, MAX_LOGPROBS), f"a whole number from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", _whole(0, MAX_LOGPROBS), f"a whole number from 0 to {MAX_LOGPROBS}"),
)
