"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from octavo.api.field_policy import honoured_fields, short_repr
from octavo.api.schemas import CommonFields, Int, check_short, parse_kwargs
from octavo.core.errors import InvalidRequest, PromptTooLong, UnsupportedParameter
from octavo.core.limits import MAX_CHAT_CHARS, MAX_FIELDS, MAX_LOGPROBS, MAX_MESSAGES, MAX_PARTS
from octavo.text.chat_template import content_texts

ROLES = ("system", "developer", "user", "assistant")
#: Roles that other servers know.
TOOL_ROLES = ("tool", "function")
#: What clients put into the assistant messages that they send back, and the values that mean nothing.
EMPTY_EXTRAS: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "refusal": (),
    "audio": (),
    "annotations": ([],),
    "reasoning": ("",),
    "reasoning_content": ("",),
    "token_ids": ([],),
}
RESERVED_TEMPLATE_KWARGS = frozenset(
    {"messages", "tools", "documents", "chat_template", "tokenize", "add_generation_prompt", "continue_final_message"}
)


def parse_messages(value: object) -> tuple[dict[str, Any], ...]:
    """Messages as ``ChatTemplate`` takes them: role, content, name where given. Raises InvalidRequest."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"messages is {short_repr(value)} but must be a list of at least one", param="messages")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(value)} messages; at most {MAX_MESSAGES}", param="messages")
    messages = tuple(_message(message, f"messages[{index}]") for index, message in enumerate(value))
    num_chars = sum(len(text) for message in messages for text in content_texts(message["content"]))
    if num_chars > MAX_CHAT_CHARS:
        raise PromptTooLong(
            f"messages have {num_chars} characters together; at most {MAX_CHAT_CHARS} are rendered", param="messages"
        )
    return messages


def _message(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is {short_repr(value)} but must be an object", param=where)
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"{where} has {len(value)} fields; at most {MAX_FIELDS}", param=where)
    for extra, empty in EMPTY_EXTRAS.items():
        if value.get(extra) is not None and value[extra] not in empty:
            raise UnsupportedParameter(f"{where}.{extra} is not supported", param=f"{where}.{extra}")
    rest = {key: item for key, item in value.items() if key not in EMPTY_EXTRAS}
    found = honoured_fields(rest, ("role", "content", "name"), where=f"{where}.")
    role: Any = found.get("role")
    name: Any = found.get("name")
    if role in TOOL_ROLES:
        raise UnsupportedParameter(f"{where}.role {role!r} is not supported", param=f"{where}.role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role is {short_repr(role)} but must be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    if name is not None and not (isinstance(name, str) and len(name) <= 256):
        raise InvalidRequest(
            f"{where}.name is {short_repr(name)} but must be a string of at most 256 characters", param=f"{where}.name"
        )
    content = found.get("content")
    if content is not None or role != "assistant":  # which may have said nothing
        content = _content(content, f"{where}.content")
    message: dict[str, Any] = {"role": role, "content": content}
    return message if name is None else message | {"name": name}


def _content(value: object, where: str) -> str | list[dict[str, str]]:
    """Text, or a list of text parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            f"{where} is {short_repr(value)} but must be a string or a list of text parts", param=where
        )
    if len(value) > MAX_PARTS:
        raise InvalidRequest(f"{where} has {len(value)} parts; at most {MAX_PARTS}", param=where)
    return [{"type": "text", "text": _part(part, f"{where}[{index}]")} for index, part in enumerate(value)]


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where} is {short_repr(value)} but must be an object", param=where)
    if len(value) == 2 and value.get("type") == "text" and isinstance(value.get("text"), str):  # nearly all
        plain: str = value["text"]
        return plain
    kind = value.get("type")
    if kind != "text":
        raise UnsupportedParameter(
            f"{where}.type is {short_repr(kind)} but only 'text' is supported", param=f"{where}.type"
        )
    text = honoured_fields(value, ("type", "text"), where=f"{where}.").get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.text is {short_repr(text)} but must be a string", param=f"{where}.text")
    return text


def _template_kwargs(value: object) -> dict[str, Any]:
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise InvalidRequest(
            f"chat_template_kwargs has {len(value)} entries; at most {MAX_FIELDS}", param="chat_template_kwargs"
        )
    found = parse_kwargs(value, "chat_template_kwargs", reserved=RESERVED_TEMPLATE_KWARGS)
    for key, item in found.items():
        check_short(item, "chat_template_kwargs")
        if not isinstance(item, str | int | float):
            raise InvalidRequest(
                f"chat_template_kwargs.{key[:80]} is {short_repr(item)} but must be a string, number or boolean",
                param="chat_template_kwargs",
            )
    return found


class ChatRequest(CommonFields):
    """A conversation to be answered."""

    messages: Annotated[Any, BeforeValidator(parse_messages, json_schema_input_type=list[dict[str, Any]])]
    max_completion_tokens: Int | None = None  # supersedes max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on from the last message
    echo: bool = False  # put that last message before the answer
    chat_template_kwargs: Annotated[
        Any, BeforeValidator(_template_kwargs, json_schema_input_type=dict[str, str | int | float | bool])
    ] = Field(default_factory=dict)

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        last_role: str = self.messages[-1]["role"]
        if (
            self.continue_final_message
            and "add_generation_prompt" in self.model_fields_set
            and self.add_generation_prompt
        ):
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        if self.continue_final_message and last_role != "assistant":
            raise InvalidRequest(
                f"continue_final_message needs a last message from the assistant, not {last_role!r}",
                param="continue_final_message",
            )
        if self.continue_final_message and len(self.messages) == 1:
            raise InvalidRequest(
                "continue_final_message needs a message before the one to go on from", param="continue_final_message"
            )
        if self.echo and not self.continue_final_message:
            raise InvalidRequest("echo in a chat needs continue_final_message: true", param="echo")

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per token; None: no logprobs at all."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def last_text(self) -> str:
        """The last message's text, parts joined by line breaks: what to echo, and to go on from."""
        return "\n".join(content_texts(self.messages[-1]["content"]))

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of the chat template besides the messages."""
        return {**self.chat_template_kwargs, "add_generation_prompt": self.add_generation_prompt}
