"""The body of ``POST /v1/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationInfo

from octavo.api.field_policy import short_repr
from octavo.api.schemas import CommonFields, Int
from octavo.core.errors import InvalidRequest, PromptTooLong, UnsupportedParameter
from octavo.core.limits import MAX_CHOICES, MAX_LOGPROBS, MAX_PROMPTS

DEFAULT_MAX_TOKENS = 16

Prompt = str | tuple[int, ...]
_IDS_SLICE = 1 << 14  # ids looked at in one call into C


def parse_prompts(value: object, info: ValidationInfo) -> tuple[Prompt, ...]:
    """The four forms of ``prompt`` (text, texts, ids, lists of ids) as a tuple of prompts. Raises InvalidRequest.

    info: its context may hold ``max_prompt_tokens``, which lists of ids are measured by before they are looked through
    """
    limit = (info.context or {}).get("max_prompt_tokens")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            f"prompt is {short_repr(value)} but must be a string, a list of strings, token ids or lists of token ids",
            param="prompt",
        )
    if type(value[0]) is int:  # type, not isinstance: a bool is no token id
        return (_ids(value, "prompt", limit),)
    if len(value) > MAX_PROMPTS:
        raise InvalidRequest(f"prompt has {len(value)} prompts; at most {MAX_PROMPTS} in one request", param="prompt")
    kinds = set(map(type, value))
    if kinds not in ({str}, {list}):
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise InvalidRequest(f"prompt has items of type {names}; give strings or token ids throughout", param="prompt")
    if kinds == {str}:
        return tuple(value)
    return tuple(_ids(ids, f"prompt[{index}]", limit) for index, ids in enumerate(value))


def _ids(value: list[Any], where: str, limit: int | None) -> tuple[int, ...]:
    if not value:
        raise InvalidRequest(f"{where} is empty; give at least one token id", param="prompt")
    if limit is not None and len(value) > limit:
        raise PromptTooLong(
            f"This model's maximum context length is {limit} tokens, but {where} has {len(value)}; shorten it or raise "
            "--max-model-len",
            param="prompt",
        )
    for start in range(0, len(value), _IDS_SLICE):
        part = value[start : start + _IDS_SLICE]
        kinds = set(map(type, part))
        if kinds != {int} or min(part) < 0 or max(part) >= 2**31:
            others = ", ".join(sorted(kind.__name__ for kind in kinds - {int})) or "numbers out of range"
            raise InvalidRequest(
                f"{where} must have token ids only, whole numbers from 0 on, but has {others}", param="prompt"
            )
    return tuple(value)


class CompletionRequest(CommonFields):
    """A prompt to be continued."""

    prompt: Annotated[
        Any, BeforeValidator(parse_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]])
    ]  # tuple[Prompt, ...]
    best_of: Int | None = None
    echo: bool = False  # put the prompt before the answer, in text and logprobs
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool = True  # begin the prompt as the model's tokenizer does

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """What to continue, in the order of the choices."""
        return tuple(self.prompt)

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        super().check()
        if self.best_of is not None and self.best_of != self.n:
            raise UnsupportedParameter(
                f"best_of is {self.best_of} but only n ({self.n}) is supported; raise n and choose", param="best_of"
            )
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"{len(self.prompts)} prompts x n = {self.n} are more than {MAX_CHOICES} choices", param="n"
            )
