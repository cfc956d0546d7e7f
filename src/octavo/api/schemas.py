"""What a request may say: the fields that both endpoints share.

The models see a body from which nulls, no-ops and refused fields are gone (``field_policy``), so a default stands for
"not given". Types are strict: 1.0 is no integer, "1" no number. Ranges of sampling fields are checked in one place,
``core.sampling_params``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
)

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
from octavo.core.sampling_params import SamplingParams, stated_fields

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


#: A field's type in ``SamplingParams`` -> its type in a body.
_HTTP_TYPES: dict[Any, Any] = {
    float: float,
    int: Int,
    int | None: Int | None,
    bool: bool,
    tuple[str, ...]: Stop,
    tuple[int, ...]: TokenIds,
    tuple[int, ...] | None: TokenIds | None,
    tuple[tuple[int, float], ...]: LogitBias,
}
#: Those of ``SamplingParams`` that have the same name and meaning here, with their types and defaults.
_SAMPLING: dict[str, Any] = {
    name: (_HTTP_TYPES[kind], default) for name, (kind, default, stated) in stated_fields().items() if stated.in_http
}
_SamplingFields: Any = create_model(
    "_SamplingFields", __config__=ConfigDict(strict=True, frozen=True, extra="forbid"), **_SAMPLING
)


class CommonFields(_SamplingFields):  # type: ignore[misc]  # a base made from a table
    """Fields of chat and completions alike. Names are OpenAI's, then vLLM's."""

    model: str | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_N)] = 1  # as a default, Field would be overruled by Int's own bounds
    stream: bool = False
    stream_options: Annotated[StreamOptions | None, BeforeValidator(_stream_options)] = None
    # the parts of the draw that are said in words, or otherwise by each endpoint
    bad_words: BadWords = ()
    dry_sequence_breakers: Breakers = DRY_SEQUENCE_BREAKERS
    max_tokens: Int | None = None
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
            parsed: Self = cls.model_validate(fields, context=context)
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
        same = {name: getattr(self, name) for name in _SAMPLING}
        if same["top_k"] == -1:  # as in vLLM
            same["top_k"] = 0
        return SamplingParams(
            **same,
            bad_words_token_ids=bad_words,
            dry_sequence_breaker_ids=breakers,
            max_tokens=max_tokens,
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
