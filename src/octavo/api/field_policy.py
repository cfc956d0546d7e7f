"""Fields that clients send and octavo does not act on: which values are harmless, which are refused.

No field is silently ignored. A field of a request is one of
- honoured: it is in the schema of the endpoint;
- a no-op (``NO_OPS``): it asks for nothing that could change the answer, or for what octavo does anyway;
- unsupported (``UNSUPPORTED``): known, and refused by name unless its value switches it off;
- unknown: refused by name, with a guess at what was meant.
``null`` means absent everywhere.
"""

from __future__ import annotations

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from octavo.core.errors import InvalidRequest, UnsupportedParameter
from octavo.core.limits import MAX_FIELDS


class NoOp(NamedTuple):
    """A field that is accepted without effect."""

    values: tuple[Any, ...] | None  # the accepted ones; None: any
    why: str


#: Accepted without effect.
NO_OPS: Mapping[str, NoOp] = {
    "user": NoOp(None, "an end user's id, for OpenAI's abuse reports"),
    "safety_identifier": NoOp(None, "an end user's id, for OpenAI's abuse reports"),
    "metadata": NoOp(None, "labels in OpenAI's dashboard"),
    "prompt_cache_key": NoOp(None, "a routing hint; the prefix cache finds every prefix by itself"),
    "prompt_cache_retention": NoOp(None, "cached blocks stay until their space is needed"),
    "parallel_tool_calls": NoOp(None, "without tools there is nothing to run in parallel"),
    "service_tier": NoOp(("auto", "default"), "there is one tier"),
    "store": NoOp((False,), "nothing is stored"),
    "skip_special_tokens": NoOp((True,), "control tokens never become text"),
    "spaces_between_special_tokens": NoOp((True, False), "control tokens never become text"),
    "cache_prompt": NoOp((True,), "prompts are always cached (llama.cpp's name)"),
}

#: Refused by name unless the value is one of these, which ask for nothing.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", []),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "grammar": ("",),
    "json_schema": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "include_reasoning": (),
    "thinking": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "detokenize": (True,),
    "return_tokens_as_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),  # a template from a request would be code from a stranger
    "documents": ([],),
    "mm_processor_kwargs": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "request_id": (),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "tfs_z": (1, 1.0),
}

#: What other servers call it.
ALIASES: Mapping[str, str] = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_completion_tokens",
    "typical": "typical_p",
    "stop_sequences": "stop",
    "input": "prompt",
    "num_beams": "use_beam_search",
    "random_seed": "seed",
    "n_probs": "logprobs",
}


class _ShortRepr(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """In the object's own order: the original sorts all keys to show the first few."""
        if len(x) > self.maxdict:
            return f"an object of {len(x)} fields"
        return (
            "{" + ", ".join(f"{self.repr1(key, level)}: {self.repr1(item, level - 1)}" for key, item in x.items()) + "}"
        )


_SHORT = _ShortRepr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlist, _SHORT.maxdict = 3, 80, 6, 6


def short_repr(value: object) -> str:
    """``repr`` of a value from a request, bounded in length and depth."""
    return _SHORT.repr(value)


def drop_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """``body`` without the fields that are null: null means absent."""
    return {name: value for name, value in body.items() if value is not None}


def honoured_fields(body: Mapping[str, Any], known: Iterable[str], *, where: str = "") -> dict[str, Any]:
    """The fields of ``body`` that are ``known``, nulls and no-ops removed.

    where: prefix of field names in errors, such as "stream_options.", for an object inside a request: the tables above
    are about the request itself.
    Raises UnsupportedParameter or InvalidRequest for any other field.
    """
    if len(body) > MAX_FIELDS:
        raise InvalidRequest(f"{where.rstrip('.') or 'the body'} has {len(body)} fields; at most {MAX_FIELDS}")
    known = frozenset(known)
    kept = {}
    for name, value in drop_nulls(body).items():
        if name in known:
            kept[name] = value
        elif where or not _is_harmless(name, value):
            raise _refusal(name, value, known, where)
    return kept


def as_markdown() -> str:
    """The tables above, for people."""

    def shown(values: Iterable[Any]) -> str:
        return ", ".join(f"`{json.dumps(value)}`" for value in values)

    no_ops = (
        f"| `{name}` | {'any' if no_op.values is None else shown(no_op.values)} | {no_op.why} |"
        for name, no_op in NO_OPS.items()
    )
    refused = (f"| `{name}` | {shown(values) or 'none'} |" for name, values in UNSUPPORTED.items())
    return "\n".join(
        (
            "Accepted without effect (any other value is a 400):",
            "\n| field | accepted | why |\n|---|---|---|",
            *no_ops,
            "\nNot supported (any other value is a 400 that names the field):",
            '\n| field | accepted, meaning "off" |\n|---|---|',
            *refused,
        )
    )


def _is_harmless(name: str, value: object) -> bool:
    if name in NO_OPS:
        accepted = NO_OPS[name].values
        return accepted is None or _is_among(value, accepted)
    return _is_among(value, UNSUPPORTED.get(name, ()))


def _is_among(value: object, accepted: tuple[Any, ...]) -> bool:
    # `type` because True == 1 in Python, and not in JSON
    return any(type(value) is type(item) and value == item for item in accepted)


def _refusal(name: str, value: object, known: frozenset[str], where: str) -> InvalidRequest:
    param = f"{where}{name[:80]}"
    if not where and (name in UNSUPPORTED or name in NO_OPS):
        accepted = (NO_OPS[name].values if name in NO_OPS else UNSUPPORTED[name]) or ()
        only = f"; only {' or '.join(map(json.dumps, accepted))} is accepted" if accepted else "; leave it out"
        return UnsupportedParameter(f"{param} = {short_repr(value)} is not supported{only}", param=param)
    close = [ALIASES[name]] if name in ALIASES else difflib.get_close_matches(name[:80], sorted(known), n=1)
    guess = f"; did you mean {close[0]}?" if close else ""
    return InvalidRequest(f"unknown parameter: {param}{guess}", param=param)
