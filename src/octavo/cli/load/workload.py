"""What is asked: request by request, each a pure function of the workload, the seed and its index."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.cli.distributions import Lengths
from octavo.cli.load.prompts import PromptMaker
from octavo.cli.load.trace import TraceEntry

EndpointKind = Literal["completions", "chat"]
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request before it is sent."""

    index: int
    group: str = ""  # reported apart
    prompt: Mapping[str, Any]  # the fields of the body that ask: prompt, or messages
    asked_prompt_tokens: int | None  # None where a trace gives the prompt itself
    output_tokens: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    has_fixed_length: bool = True  # the answer should have exactly output_tokens
    expect: Literal["json", "tool_calls"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Random prompts, behind shared prefixes if there are any."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: int = 0  # tokens, before those of the prompt
    prefix_groups: int = 1  # that many different prefixes, taken in turn
    fields: Mapping[str, Any] = field(default_factory=dict)  # response_format, tools, ...
    expect: Literal["json", "tool_calls"] | None = None
    has_fixed_length: bool = True

    def request(self, index: int, asker: Asker, group: str = "") -> PlannedRequest:
        """The request of that number. Other groups ask other things."""
        rng = random.Random(f"{asker.seed}/{group}/{index}")
        tokens, output_tokens = self.prompt_tokens.draw(rng), self.output_tokens.draw(rng)
        prefix = Prefix(str(index % self.prefix_groups), self.shared_prefix) if self.shared_prefix else None
        return PlannedRequest(
            index=index,
            group=group,
            prompt=asker.random(tokens, rng, prefix, INSTRUCTIONS[self.expect] if self.expect else ""),
            asked_prompt_tokens=self.shared_prefix + tokens,
            output_tokens=output_tokens,
            fields=self.fields,
            has_fixed_length=self.has_fixed_length and self.expect is None,
            expect=self.expect,
        )


def from_trace(entry: TraceEntry, index: int, asker: Asker, *, has_fixed_length: bool) -> PlannedRequest:
    """A trace's request: its own prompt, or a random one of that length."""
    asked = None
    if entry.messages is not None:
        prompt: Mapping[str, Any] = {"messages": entry.messages}
    elif entry.prompt is not None:
        prompt = asker.given(entry.prompt)
    else:
        assert entry.prompt_tokens is not None
        asked = entry.prefix_tokens + entry.prompt_tokens
        prefix = Prefix(entry.prefix_group, entry.prefix_tokens) if entry.prefix_group is not None else None
        prompt = asker.random(entry.prompt_tokens, random.Random(f"{asker.seed}/trace/{index}"), prefix)
    return PlannedRequest(
        index=index,
        prompt=prompt,
        asked_prompt_tokens=asked,
        output_tokens=entry.output_tokens,
        fields=entry.fields,
        has_fixed_length=has_fixed_length and not entry.fields.keys() & {"response_format", "tools"},
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """What several requests begin with. The same name, maker and seed give the same tokens."""

    name: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Puts prompts into the form that the endpoint and the server take."""

    endpoint: EndpointKind
    maker: PromptMaker
    seed: int

    def random(
        self, tokens: int, rng: random.Random, prefix: Prefix | None, instruction: str = ""
    ) -> Mapping[str, Any]:
        """The asking fields of a body: ``tokens`` random ones behind the prefix, which is a chat's system message."""
        before = None
        if prefix is not None:
            before = self.maker.make(prefix.tokens, random.Random(f"{self.seed}/prefix/{prefix.name}"), is_part=True)
        own = self.maker.make(tokens, rng)
        if instruction:
            assert isinstance(own, str)
            own = f"{own}\n{instruction}"
        return self.given(own, before)

    def given(self, own: Prompt, before: Prompt | None = None) -> Mapping[str, Any]:
        """The same for a prompt that is there."""
        if self.endpoint == "chat":
            system = [] if before is None else [{"role": "system", "content": before}]
            return {"messages": [*system, {"role": "user", "content": own}]}
        if isinstance(own, str):
            return {"prompt": own if before is None else f"{before} {own}"}
        assert not isinstance(before, str)
        return {"prompt": [*(before or ()), *own]}


#: Put behind a random prompt, so that even a small model has a reason to answer in form.
INSTRUCTIONS = {
    "json": "Answer with a JSON object that describes a person who fits these words.",
    "tool_calls": "Look up the weather in a city of your choice. Use the tool.",
}
#: What --schema example and --tools example send.
EXAMPLE_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
EXAMPLE_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "kelvin"]}},
                "required": ["city"],
            },
        },
    },
)
