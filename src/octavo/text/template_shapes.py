"""What shapes of messages a chat template takes, found by rendering small chats with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from octavo.core.errors import InvalidRequest
from octavo.text.template_budget import RenderLimit
from octavo.text.template_probe import TOOL, probe
from octavo.text.template_sandbox import SandboxedTemplate

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same, in transformers' order
_FIRST, _SECOND, _KEY, _VALUE = "octavo one", "octavo two", "octavo_argument", "octavo value"
_JSON_ARGUMENTS = f'{{"{_KEY}": "{_VALUE}"}}'


class TemplateShapes:
    """Fits messages to a template. Looks are made when first needed and kept; safe to call from several threads.

    names: the template's variables ``bos_token`` and ``eos_token``

    Clients speak OpenAI's form: ``content`` null beside tool calls, text or a list of parts, arguments of calls as JSON
    in a string. Each is given to the template as it is where the template can take that, for then the prompt is the one
    that ``transformers`` makes of the same messages; and otherwise in the form that the template was written for.
    """

    def __init__(self, template: SandboxedTemplate, names: Mapping[str, str]) -> None:
        self._template = template
        self._names = names
        self._gave_up = False
        self._takes_parts = cache(self._find_takes_parts)  # by role: five

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as ``normalise_messages`` leaves them, in the form that the template takes."""
        return [self._fit(message, index) for index, message in enumerate(messages)]

    def _fit(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        fitted = dict(message)
        content = message["content"]
        if content is None:
            takes = self._takes_none_beside_calls if message.get("tool_calls") else self._takes_none
            fitted["content"] = None if takes else ""
        elif not isinstance(content, str):
            if not self._takes_parts(message["role"]):
                fitted["content"] = "\n".join(part["text"] for part in content)
        elif self._needs_parts and self._takes_parts(message["role"]):
            fitted["content"] = [{"type": "text", "text": content}]
        if isinstance(message.get("tool_calls"), list):
            fitted["tool_calls"] = [self._fit_call(call, index) for call in message["tool_calls"]]
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            fitted = {"thinking": reasoning, **fitted, "reasoning_content": reasoning}
        return fitted

    def _fit_call(self, call: Any, index: int) -> Any:
        """A call whose arguments are a string or an object, whichever the template writes as JSON."""
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping):
            return call
        arguments = inner.get("arguments")
        fitted: Any
        if isinstance(arguments, str) and not self._takes_string_arguments:
            try:
                fitted = json.loads(arguments or "{}")
            except (ValueError, RecursionError):
                fitted = None
            if not isinstance(fitted, dict):
                raise InvalidRequest(
                    f"messages[{index}].tool_calls holds arguments that are no JSON object: {arguments!r:.80}",
                    param="messages",
                )
        elif isinstance(arguments, Mapping) and not self._survives_object_arguments:
            fitted = json.dumps(arguments, ensure_ascii=False)
        else:
            return call
        inner = {**inner, "arguments": fitted}
        return {**call, "function": inner} if "function" in call else inner

    @cached_property
    def _takes_none(self) -> bool:
        return self._is_none_as_good_as_empty({"role": "assistant"})

    @cached_property
    def _takes_none_beside_calls(self) -> bool:
        return self._is_none_as_good_as_empty(self._calling(self._arguments))

    def _is_none_as_good_as_empty(self, answer: Mapping[str, Any]) -> bool:
        """Whether null content makes neither an error that "" does not make, nor the word "None" in the prompt."""
        none, empty = (self._render(self._chat({**answer, "content": content})) for content in (None, ""))
        if none is None:
            return empty is None
        return none.count("None") <= (empty or "").count("None")

    def _find_takes_parts(self, role: str) -> bool:
        """Whether two parts come out as their texts, and not as the list that they were in."""
        parts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        text = self._render(self._chat_with(role, parts))
        if text is None or _FIRST not in text or _SECOND not in text:
            return False
        return not any(f"{quote}text{quote}: {quote}{_FIRST}" in text for quote in "'\"")

    @cached_property
    def _needs_parts(self) -> bool:
        """Whether a text comes out only if it is in a part."""
        plain = self._render(self._chat_with("user", _FIRST))
        return (plain is None or _FIRST not in plain) and self._takes_parts("user")

    @cached_property
    def _takes_string_arguments(self) -> bool:
        """Whether a string comes out as it is, not quoted a second time."""
        text = self._render(self._chat({**self._calling(_JSON_ARGUMENTS), "content": ""}))
        return (text is not None and _JSON_ARGUMENTS in text) or not self._takes_object_arguments

    @cached_property
    def _takes_object_arguments(self) -> bool:
        """Whether an object comes out as JSON or taken apart, not as Python writes it."""
        text = self._with_object_arguments
        return text is not None and _VALUE in text and f"'{_KEY}'" not in text

    @property
    def _survives_object_arguments(self) -> bool:
        return self._with_object_arguments is not None or not self._takes_string_arguments

    @cached_property
    def _with_object_arguments(self) -> str | None:
        return self._render(self._chat({**self._calling({_KEY: _VALUE}), "content": ""}))

    @property
    def _arguments(self) -> Any:
        return _JSON_ARGUMENTS if self._takes_string_arguments else {_KEY: _VALUE}

    @staticmethod
    def _calling(arguments: Any) -> dict[str, Any]:
        call = {"id": "octavo123", "type": "function", "function": {"name": "octavo_tool", "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}

    def _chat_with(self, role: str, content: Any) -> list[dict[str, Any]]:
        """A chat in which a message of that role has that content."""
        if role == "user":
            return [{"role": "user", "content": content}]
        if role == "assistant":
            return self._chat({"role": "assistant", "content": content})
        if role == "tool":
            return self._chat({**self._calling(self._arguments), "content": ""}, result=content)
        return [{"role": role, "content": content}, {"role": "user", "content": "octavo asks"}]

    @staticmethod
    def _chat(answer: Mapping[str, Any], result: Any = "octavo result") -> list[dict[str, Any]]:
        chat = [{"role": "user", "content": "octavo asks"}, dict(answer)]
        if "tool_calls" not in answer:
            return [*chat, {"role": "user", "content": "octavo asks again"}]
        return [*chat, {"role": "tool", "name": "octavo_tool", "tool_call_id": "octavo123", "content": result}]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        if self._gave_up:
            return None
        tools = {"tools": [TOOL]} if any("tool_calls" in message for message in messages) else {}
        variables = {**self._names, **tools, "messages": messages, "add_generation_prompt": True}
        try:
            return probe(self._template, variables)
        except RenderLimit:  # it will not end for real messages either; one look is enough
            self._gave_up = True
            return None
