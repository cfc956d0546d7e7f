"""What a request may say: the fields that both endpoints share.

The models see a body from which nulls, no-ops and refused fields are gone (``field_policy``), so a default stands for
"not given". Types are strict: 1.0 is no integer, "1" no number. Ranges of sampling fields are checked in one place,
``core.sampling_params``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from octavo.api.field_policy import drop_nulls, honoured_fields, short_repr
from octavo.core.errors import InvalidRequest, UnsupportedParameter
from octavo.core.limits import (
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_FIELD_CHARS,
    MAX_N,
    MAX_SEQUENCE_BREAKERS,
    MAX_STOP_STRINGS,
    MAX_TOKEN_ID_LIST,
    MAX_WORD_CHARS,
)
from octavo.core.sampling_params import SamplingParams

#: What DRY's repeats do not reach across, if the request does not say.
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")

_DECIMAL = re.compile(r"0|-?[1-9][0-9]{0,17}")  # one spelling per number, so that no token is named twice


def _entries(limit: int) -> Callable[[Any, ValidationInfo], Any]:
    """A list as a tuple (JSON has only lists), once it is known to be short, and its strings too."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list | dict):
            return value
        if len(value) > limit:
            name = info.field_name or ""
            raise InvalidRequest(f"{name} has {len(value)} entries but takes at most {limit}", param=name)
        for item in value:
            check_short(item, info.field_name or "")
        return tuple(value) if isinstance(value, list) else value

    return check


def check_short(value: object, name: str) -> None:
    """Before anything walks through it."""
    if isinstance(value, str) and len(value) > MAX_FIELD_CHARS:
        raise InvalidRequest(f"{name} has {len(value)} characters but takes at most {MAX_FIELD_CHARS}", param=name)


def _one_or_more(value: object) -> object:
    """``stop``: a string or a list of strings, as a list."""
    if not isinstance(value, str | list):
        raise InvalidRequest(f"stop is {short_repr(value)} but must be a string or a list of strings", param="stop")
    return [value] if isinstance(value, str) else value


def _bias_pairs(value: object) -> object:
    """``{"token id": bias}`` -> pairs; the keys of a JSON object are strings."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"logit_bias is {short_repr(value)} but must be an object", param="logit_bias")
    for key in value:
        if not _DECIMAL.fullmatch(key):
            raise InvalidRequest(f"logit_bias has the key {key[:40]!r}, which is no token id", param="logit_bias")
    return tuple((int(key), bias) for key, bias in value.items())


#: JSON integers are unbounded; these fit 64 bits.
Int = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
TokenIds = Annotated[tuple[Int, ...], BeforeValidator(_entries(MAX_TOKEN_ID_LIST), json_schema_input_type=list[int])]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
# each word becomes up to two token sequences: with and without a leading space
BadWords = Annotated[tuple[Word, ...], BeforeValidator(_entries(MAX_BAD_WORDS // 2), json_schema_input_type=list[str])]
Breakers = Annotated[
    tuple[Word, ...], BeforeValidator(_entries(MAX_SEQUENCE_BREAKERS), json_schema_input_type=list[str])
]
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_entries(MAX_STOP_STRINGS)),
    BeforeValidator(_one_or_more, json_schema_input_type=str | list[str]),
]
LogitBias = Annotated[
    tuple[tuple[Int, float], ...],
    BeforeValidator(_bias_pairs, json_schema_input_type=dict[str, float]),
    BeforeValidator(_entries(MAX_TOKEN_ID_LIST)),
]


def _stream_options(value: object) -> object:
    if not isinstance(value, dict):
        raise InvalidRequest(f"stream_options is {short_repr(value)} but must be an object", param="stream_options")
    for name in ("include_obfuscation", "continuous_usage_stats"):
        if value.get(name) not in (None, False):
            raise UnsupportedParameter(f"stream_options.{name} is not supported", param=f"stream_options.{name}")
    rest = {name: item for name, item in value.items() if item is not False}
    return StreamOptions(**honoured_fields(rest, StreamOptions.model_fields, where="stream_options."))


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False  # one more chunk before the end, with no choices and the token counts


class CommonFields(BaseModel):
    """Fields of chat and completions alike. Names are OpenAI's, then vLLM's."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_N)] = 1  # as a default, Field would be overruled by Int's own bounds
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_stream_options)] = None
    # draws
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int = 0  # 0 or -1: off
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    seed: Int | None = None  # -1: random
    # penalties
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: Int = 2
    dry_penalty_last_n: Int = -1
    dry_sequence_breakers: Breakers = DRY_SEQUENCE_BREAKERS
    # masks
    logit_bias: LogitBias = ()
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords = ()
    # stopping
    max_tokens: Int | None = None
    min_tokens: Int = 0
    stop: Stop = ()
    stop_token_ids: TokenIds = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    # reports
    prompt_logprobs: Int | None = None
    return_token_ids: bool = False
    # scheduling
    priority: Int | None = None  # lower runs first; who may ask for how much: ServerConfig.most_urgent_priority
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)] | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, max_prompt_tokens: int | None = None) -> Self:
        """The request in ``body``. Raises InvalidRequest or UnsupportedParameter naming the field at fault.

        max_prompt_tokens: a longer prompt of token ids is refused (PromptTooLong) before it is looked through
        """
        context = {"max_prompt_tokens": max_prompt_tokens}
        fields = honoured_fields(body, cls.model_fields)
        for name, value in fields.items():
            if name not in ("messages", "prompt"):
                check_short(value, name)
        try:
            parsed = cls.model_validate(fields, context=context)
        except ValidationError as error:
            raise _first_error(error) from error
        parsed.check()
        return parsed

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise UnsupportedParameter("prompt_logprobs is not supported with stream: true", param="prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(
        self,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
        bad_words: tuple[tuple[int, ...], ...],
        breakers: tuple[int, ...],
    ) -> SamplingParams:
        """The engine's form. Raises InvalidRequest for a value out of range.

        bad_words, breakers: the token ids of the fields given as text.
        """
        return SamplingParams(
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            bad_words_token_ids=bad_words,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            dry_sequence_breaker_ids=breakers,
            temperature=self.temperature,
            top_k=0 if self.top_k == -1 else self.top_k,
            typical_p=self.typical_p,
            top_p=self.top_p,
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            seed=self.seed,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "an object",
    "list_type": "a list",
}


def _first_error(error: ValidationError) -> InvalidRequest:
    """The first of pydantic's complaints, in our words."""
    first = error.errors(include_url=False, include_context=True)[0]
    param = str(first["loc"][0])
    for part in first["loc"][1:]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}"
    value, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "missing":
            return InvalidRequest(f"{param} is required", param=param)
        case "too_long" | "too_short" as kind:
            limit = context.get("max_length", context.get("min_length"))
            bound = "at most" if kind == "too_long" else "at least"
            return InvalidRequest(f"{param} has {len(value)} entries but takes {bound} {limit}", param=param)
        case "string_too_long" | "string_too_short" as kind:
            limit = context.get("max_length", context.get("min_length"))
            bound = "at most" if kind == "string_too_long" else "at least"
            return InvalidRequest(f"{param} has {len(value)} characters but takes {bound} {limit}", param=param)
        case "greater_than_equal":
            wanted = f"at least {context['ge']}"
        case "less_than_equal":
            wanted = f"at most {context['le']}"
        case kind:
            wanted = _WANTED.get(kind, first["msg"])
    return InvalidRequest(f"{param} is {short_repr(value)} but must be {wanted}", param=param)


def parse_kwargs(value: object, name: str, *, reserved: frozenset[str]) -> dict[str, Any]:
    """An object of keyword arguments for the model's chat template. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} is {short_repr(value)} but must be an object", param=name)
    for key in value:
        if key in reserved:
            raise InvalidRequest(f"{name}.{key} cannot be set; it is the server's", param=f"{name}.{key}")
    return drop_nulls(value)
