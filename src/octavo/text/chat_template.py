"""Messages to prompt tokens, through the model's own Jinja template."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError, TemplateSyntaxError

from octavo.core.errors import InvalidRequest, ModelFileError
from octavo.core.steps import Steps, finish
from octavo.text.template_budget import RenderLimit
from octavo.text.template_sandbox import EXPRESSION_ERRORS, compile_template
from octavo.text.template_shapes import TemplateShapes
from octavo.text.tokenizer import Tokenizer
from octavo.text.turn_ends import FindToken, ends_of_answer
from octavo.text.vocabulary import DISGUISES, SpecialToken, SpecialTokenMatcher

ROLES = ("system", "developer", "user", "assistant", "tool")
_WINDOW = 1 << 12  # characters of a message that one call looks through; each may need a look of its own
_IS_DISGUISE = re.compile(f"[{DISGUISES}]")
_DISGUISES = _IS_DISGUISE.findall("".join(map(chr, range(0x2800, 0xF900))))


class ChatTemplate:
    """A model's chat template. Immutable; safe to call from several threads at once.

    A user must not be able to forge a turn by writing control tokens into a message. So before rendering, every string
    that came with the request is disguised: wherever a control token might begin, its first character is replaced by a
    character that occurs nowhere in the request or the template. Whatever the template does with such
    text, control tokens in the result are the template's own. The result is cut at them, the disguise is taken off
    the plain pieces, and these are encoded by an encoder that knows no special tokens.

    Left alone are tags that the template itself looks for in messages (``</think>``), unless they are control tokens.
    User-defined tokens that the template writes but does not look for are protected like control tokens.

    end_token_ids: the special tokens with which the template ends an answer: there it must end

    source:                   Jinja source; ``raise_exception``, ``strftime_now`` and ``tojson`` work as in transformers
    allow_special_in_content: let control tokens in messages be control tokens
    time_limit_s:             longest rendering; template_sandbox.py says what else is bounded

    Raises ``ModelFileError`` if the source does not compile.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, allow_special_in_content: bool = False, time_limit_s: float = 2.0
    ) -> None:
        self._tokenizer = tokenizer
        self._time_limit_s = time_limit_s
        self._protect = not allow_special_in_content
        try:
            self._template = compile_template(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        except (TemplateError, SyntaxError, *EXPRESSION_ERRORS) as error:
            raise ModelFileError(f"the chat template does not compile: {error}") from error
        self._guard = _Guard(tokenizer, _Literals(self._template.tree))
        ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
        self._names = {name: tokenizer.token_text(i) for name, i in ids.items() if i is not None}
        self._shapes = TemplateShapes(self._template, self._names)
        find = _finder(tokenizer.special_tokens)
        self.end_token_ids = ends_of_answer(source, self._names, tokenizer.bos_token_id, find)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Prompt ids. The template writes BOS if the model wants one. Raises as ``render`` does."""
        return finish(self.encode_steps(messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs))

    def encode_steps(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_tokens: int | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Steps[list[int]]:
        """``encode`` in pieces. Raises ``PromptTooLong`` as soon as there must be more than ``max_tokens`` ids.

        It is the rendered text that is measured: a template may leave out parts of messages.
        """
        text, disguise = yield from self._render(messages, add_generation_prompt, tools, kwargs)
        yield from self._tokenizer.check_length_steps(text, max_tokens, disguised=bool(disguise))
        undo = {put: char for char, put in disguise.items()}
        special = self._tokenizer.special_tokens
        return (yield from self._tokenizer.encode_text_steps(text, special, undo=undo, max_tokens=max_tokens))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text.

        messages: ``role`` is one of system, developer (= system), user, assistant, tool; ``content`` is a string, in an
                  assistant's also null, or a list of ``{"type": "text", "text": ...}``, which are joined by line breaks
                  for a template that does not take lists
        kwargs:   further variables for the template

        Raises ``InvalidRequest`` for other messages, and with the template's own words where the template refuses.
        """
        text, disguise = finish(self._render(messages, add_generation_prompt, tools, kwargs))
        return text.translate({ord(put): char for char, put in disguise.items()})

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None,
        kwargs: Mapping[str, Any],
    ) -> Steps[tuple[str, dict[str, str]]]:
        """The text in disguise, and the disguise: real character -> the one in its place."""
        if reserved := kwargs.keys() & {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"}:
            raise InvalidRequest(
                f"{min(reserved)} is not for chat_template_kwargs to set", param="chat_template_kwargs"
            )
        given = {**kwargs, "messages": self._shapes.fit(normalise_messages(messages)), "tools": tools}
        disguise: dict[str, str] = {}
        try:
            strings = list(_strings(given))
            if self._protect:
                disguise = yield from self._guard.choose_disguise(strings)
                given = yield from self._guard.disguise_values(given, disguise)
            yield
            text = self._template.render(
                {**given, **self._names, "add_generation_prompt": add_generation_prompt},
                time_limit_s=self._time_limit_s,
                num_input_chars=sum(map(len, strings)),
                disguised={put: char for char, put in disguise.items()},
            )
        except RenderLimit as error:
            raise InvalidRequest(f"{error}; send less, or serve with another template", param="messages") from error
        except TemplateError as error:
            raise InvalidRequest(f"the model's chat template refused: {error.message}", param="messages") from error
        except EXPRESSION_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return text, disguise


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies: ``developer`` as ``system``; ``content`` text, text parts or None. Raises ``InvalidRequest``."""
    if not messages:
        raise InvalidRequest("messages is empty; send at least one", param="messages")
    normal = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if role not in ROLES:
            raise InvalidRequest(
                f"messages[{i}].role is {role!r:.80} but must be one of {', '.join(ROLES)}", param="messages"
            )
        content = _check_content(message.get("content"), i, may_be_null=role == "assistant")
        normal.append({**message, "role": "system" if role == "developer" else role, "content": content})
    return normal


def content_texts(content: Any) -> list[str]:
    """The texts of a message's content, which need not have been checked: itself, those of its parts, or none."""
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return [text for text in texts if isinstance(text, str)]


def _check_content(content: Any, index: int, *, may_be_null: bool) -> str | list[Any] | None:
    if isinstance(content, str) or (content is None and may_be_null):
        return content
    where = f"messages[{index}].content"
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where} is of type {type(content).__name__} but must be a string or a list of text parts",
            param="messages",
        )
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InvalidRequest(f"{where}[{i}] is of type {kind!r:.80}; this model takes text", param="messages")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{where}[{i}].text must be a string", param="messages")
    return content


def _finder(special: SpecialTokenMatcher) -> FindToken:
    def find(text: str) -> tuple[int, str] | None:
        token = special.match(text, 0)
        return None if token is None else (token.token_id, text[len(token.text) :])

    return find


class _Literals:
    """The string literals of a template, by what it does with them."""

    def __init__(self, tree: nodes.Template) -> None:
        self.all = {node.data for node in tree.find_all(nodes.TemplateData)}
        self.all |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        self.sought: set[str] = set()  # compared with, or passed to a method, filter or test
        for node in tree.find_all((nodes.Compare, nodes.Call, nodes.Filter, nodes.Test)):
            skip = () if isinstance(node, nodes.Compare) else ("node",)
            for child in node.iter_child_nodes(exclude=skip):
                operand = child.expr if isinstance(child, nodes.Operand) else child
                if isinstance(operand, nodes.Const) and isinstance(operand.value, str):
                    self.sought.add(operand.value)


class _Guard:
    """Finds where in a request's strings a protected token might begin or be completed, and disguises it there."""

    def __init__(self, tokenizer: Tokenizer, literals: _Literals) -> None:
        written = "\0".join(literals.all)
        protected = {token.text for token in tokenizer.control_tokens}
        harmless: set[str] = set()
        for token in tokenizer.user_defined_tokens:
            forgeable = token.text in written and token.text not in literals.sought
            (protected if forgeable else harmless).add(token.text)
        self._first_chars = frozenset(text[0] for text in protected)
        self._begins = re.compile("|".join(map(re.escape, sorted(self._first_chars)))) if protected else None
        # What the template looks for and what is a token of its own stays readable, unless a protected token is near.
        prefixes = {text[:size] for text in protected for size in range(1, len(text) + 1)}
        self._readable = SpecialTokenMatcher(
            SpecialToken(text, 0)
            for text in literals.sought | harmless
            if len(text) > 1 and text not in prefixes and not any(text.startswith(other) for other in protected)
        )
        # After a literal that ends inside a protected token (as in '<|' + name + '|>') text could complete the token.
        self._completing = frozenset(
            text[size]
            for text in protected
            for size in range(1, len(text))
            if any(literal.endswith(text[:size]) for literal in literals.all)
        )
        self._sought = literals.sought
        self._longest_sought = max(map(len, literals.sought), default=0)
        self._taken = set(_IS_DISGUISE.findall(written)) | set(_IS_DISGUISE.findall("".join(protected)))

    def choose_disguise(self, strings: Sequence[str]) -> Steps[dict[str, str]]:
        """A character that is found in none of ``strings`` for each that may have to be hidden."""
        taken = set(self._taken)
        for text in strings:
            for start in range(0, len(text), _WINDOW):
                taken.update(_IS_DISGUISE.findall(text, start, start + _WINDOW))
                if start:
                    yield
        free = (char for char in _DISGUISES if char not in taken)
        disguise = dict(zip(sorted(self._first_chars | self._completing), free, strict=False))
        if len(disguise) < len(self._first_chars | self._completing):
            raise InvalidRequest(
                "messages use all private-use characters, hexagrams and Braille patterns; send fewer", param="messages"
            )
        return disguise

    def disguise_values(self, given: Mapping[str, Any], disguise: Mapping[str, str]) -> Steps[dict[str, Any]]:
        """``given`` with its strings disguised, except names of variables and roles, which have been checked."""
        changed: dict[str, Any] = {}
        for name, value in given.items():
            changed[name] = yield from self._apply_deep(value, disguise)
        for message, original in zip(changed["messages"], given["messages"], strict=True):
            message["role"] = original["role"]
        return changed

    def _apply_deep(self, value: Any, disguise: Mapping[str, str]) -> Steps[Any]:
        if isinstance(value, str):
            return self._hide_completions((yield from self._hide_beginnings(value, disguise)), disguise)
        if isinstance(value, Mapping):
            changed: dict[Any, Any] = {}
            for key, item in value.items():
                # Keys are looked up by name: the template could not find "name" if its first letter were hidden.
                name = (yield from self._hide_beginnings(key, disguise)) if isinstance(key, str) else key
                changed[name] = yield from self._apply_deep(item, disguise)
            yield
            return changed
        if isinstance(value, list | tuple):
            items: list[Any] = []
            for item in value:
                found = yield from self._apply_deep(item, disguise)
                items.append(found)
            return items
        return value

    def _hide_beginnings(self, text: str, disguise: Mapping[str, str]) -> Steps[str]:
        """So that no protected token begins in ``text``."""
        if self._begins is None:
            return text
        parts = []
        for start in range(0, len(text), _WINDOW):

            def hide(found: re.Match[str], start: int = start) -> str:
                return found[0] if self._readable.match(text, start + found.start()) else disguise[found[0]]

            parts.append(self._begins.sub(hide, text[start : start + _WINDOW]))
            if start:
                yield
        return "".join(parts)

    def _hide_completions(self, text: str, disguise: Mapping[str, str]) -> str:
        """So that no protected token that began before ``text`` goes on in it."""
        at = len(text) - len(text.lstrip()) if self._completing else len(text)
        if text[at : at + 1] not in self._completing or (len(text) <= self._longest_sought and text in self._sought):
            return text
        return text[:at] + disguise[text[at]] + text[at + 1 :]


def _strings(value: Any) -> Iterator[str]:
    """Every string inside, keys too."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
