"""The 51 published chat templates of tests/data/templates: as transformers renders them, and where they end."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import InvalidRequest
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import BYTE_LEVEL_ALPHABET

FOLDER = Path(__file__).parents[1] / "data" / "templates"
BOS, EOS = "<s>", "</s>"

# What is written behind an answer: the end of a turn by the models' cards and generation_config.json, or nothing but
# plain text. "</s>" is the EOS of the test, which templates ask for by name.
ENDS = {
    "Apriel-1.6-15b-Thinker-fixed": "<|end|>",
    "ByteDance-Seed-OSS": "<seed:eos>",
    "CohereForAI-c4ai-command-r-plus-tool_use": "<|END_OF_TURN_TOKEN|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    "GLM-4.6": "<|user|>",
    "GigaChat3-10B-A1.8B": "<|message_sep|>",
    "HuggingFaceTB-SmolLM3-3B": "<|im_end|>",
    "Kimi-K2-Instruct": "<|im_end|>",
    "Kimi-K2-Thinking": "<|im_end|>",
    "LFM2-8B-A1B": "<|im_end|>",
    "LFM2.5-Instruct": "<|im_end|>",
    "MiMo-VL": "<|im_end|>",
    "MiniMax-M1": "<end_of_sentence>",
    "MiniMax-M2": "[e~[",
    "Mistral-Small-3.2-24B-Instruct-2506": EOS,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "<|im_end|>",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "<|im_end|>",
    "Qwen-QwQ-32B": "<|im_end|>",
    "Qwen-Qwen2.5-7B-Instruct": "<|im_end|>",
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "Qwen3-Coder": "<|im_end|>",
    "Qwen3.5-4B": "<|im_end|>",
    "Reka-Edge": "<sep>",
    "Spark2.5": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "StepFun3.5-Flash": "<|im_end|>",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek-ai-DeepSeek-V3.1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek-ai-DeepSeek-V4-Flash-0731": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "deepseek-ai-DeepSeek-V4": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "fireworks-ai-llama-3-firefunction-v2": "<|eot_id|>",
    "google-gemma-2-2b-it": "<end_of_turn>",
    "google-gemma-4-31B-it-interleaved": "<turn|>",
    "google-gemma-4-31B-it": "<turn|>",
    "ibm-granite-granite-3.3-2B-Instruct": "<|end_of_text|>",
    "ibm-granite-granite-4.0": "<|end_of_text|>",
    "llama-cpp-deepseek-r1": "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "llama-cpp-rwkv-world": "",
    "llm-jp-llm-jp-4.1-8b-thinking": "<|return|>",
    "meetkai-functionary-medium-v3.1": "<|eot_id|>",
    "meetkai-functionary-medium-v3.2": "<|eot_id|>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "meta-llama-Llama-3.2-3B-Instruct": "<|eot_id|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "mistralai-Mistral-Nemo-Instruct-2407": EOS,
    "moonshotai-Kimi-K2": "<|im_end|>",
    "muse-glimmer": "<|eot|>",
    "openai-gpt-oss-120b": "<|return|>",
    "poolside-Laguna-S-2.1": "</assistant>",
    "poolside-Laguna-XS-2.1": "</assistant>",
    "unsloth-Apriel-1.5": f"<|end|>\n{EOS}",
}
NAMES = sorted(ENDS)
NO_PROMPT_WITHOUT_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
}
MORE = {"fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "today"}}  # variables of its own
REFUSES_SOME_OF_TOOLS = {  # more calls than one, a role, or what the sandbox does not allow
    "google-gemma-2-2b-it",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "llama-cpp-deepseek-r1",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
}
# Beside calls: an error, or "None" in the prompt.
NULL_BECOMES_EMPTY = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "GLM-4.6",
    "MiniMax-M2",
    "Qwen-QwQ-32B",
    "Qwen-Qwen3-0.6B",
    "ibm-granite-granite-3.3-2B-Instruct",
    "llm-jp-llm-jp-4.1-8b-thinking",
    "microsoft-Phi-3.5-mini-instruct",
    "openai-gpt-oss-120b",
}
MARKS = re.compile(r"<\|?[^<>\s{}'\"]{1,40}\|?>|\[/?[A-Z_]{2,30}\]|\[e~\[|\]~b\]|\]~!b\[")
TAGS = re.compile("think|tool|THINK|response")  # vocabularies have these as user-defined: found in any text


def source_of(name: str) -> str:
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def chat_of(name: str, *, forget_kinds: bool = False) -> tuple[Tokenizer, ChatTemplate]:
    """With a vocabulary of all marks that the template writes, and of bytes."""
    source = source_of(name)
    marks = sorted(set(MARKS.findall(source)) - {BOS, EOS})
    kinds = [3, 3, *(4 if TAGS.search(mark) else 3 for mark in marks), *[1] * 257]
    tokenizer = Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": (BOS, EOS, *marks, *BYTE_LEVEL_ALPHABET, "Ġt"),
            "tokenizer.ggml.token_type": None if forget_kinds else tuple(kinds),
            "tokenizer.ggml.merges": ("Ġ t",),
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.chat_template": source,
        }
    )
    return tokenizer, ChatTemplate(source, tokenizer)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def assistant(content: Any, *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(arguments: Any, number: int = 1) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": f"abcd1234{number}", "type": "function", "function": function}


def with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    texts = [json.dumps(made["function"]["arguments"], ensure_ascii=False) for made in message["tool_calls"]]
    return {**message, "tool_calls": [call(text, number) for number, text in enumerate(texts, 1)]}


def result(content: Any, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "name": "get_weather", "tool_call_id": f"abcd1234{number}", "content": content}


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


PROPERTIES = {
    "city": {"type": "string", "description": "Name of the city, as in <b>Köln</b>"},
    "days": {"type": "integer", "description": "How many"},
    "unit": {"type": "string", "enum": ["c", "f"], "description": "Celsius & co."},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Gets the 'weather'",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]
ARGUMENTS = {"city": "Köln", "days": 2}
JSON_ARGUMENTS = json.dumps(ARGUMENTS)
CHATS: dict[str, list[dict[str, Any]]] = {
    "a question": [user(' Hi "there" <b>& é ')],
    "system": [system("Be brief."), user("Hi")],
    "turns": [user("Hi"), assistant("Hello"), user("More?"), assistant("Yes."), user("ok")],
    "thoughts": [system("Be brief."), user("Hi"), assistant("<think>\nhm\n</think>\n\nHello"), user("More?")],
    "reasoning": [user("Hi"), assistant("Hello", reasoning_content="hm"), user("More?")],
    "an answer last": [user("Hi"), assistant("Hello")],
}
TOOL_CHATS: dict[str, list[dict[str, Any]]] = {
    "tools": [user("Weather?")],
    "tools and system": [system("Be brief."), user("Weather?")],
    "a call": [user("Weather?"), assistant("", call(ARGUMENTS)), result("{}"), assistant("Cold."), user("Thanks")],
    "two calls": [
        user("Weather?"),
        assistant("Let me see.", call(ARGUMENTS), call({"city": "X"}, 2)),
        result("7"),
        result("8", 2),
    ],
}


def rendered(
    name: str, messages: Sequence[Any], *, tools: Any = None, add_generation_prompt: bool = True
) -> str | Exception:
    """By transformers; its error where it has none."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if name in NO_PROMPT_WITHOUT_TOOLS:
        tools = tools or TOOLS
    try:
        texts, _ = render_jinja_template(
            [copy.deepcopy(messages)],
            chat_template=source_of(name),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            bos_token=BOS,
            eos_token=EOS,
            **MORE.get(name, {}),
        )
    except Exception as error:  # noqa: BLE001
        return error
    text: str = texts[0]
    return text


def ours(
    name: str, messages: Sequence[Any], *, tools: Any = None, add_generation_prompt: bool = True
) -> str | Exception:
    if name in NO_PROMPT_WITHOUT_TOOLS:
        tools = tools or TOOLS
    _, chat = chat_of(name)
    try:
        text = chat.render(messages, tools=tools, add_generation_prompt=add_generation_prompt, **MORE.get(name, {}))
    except InvalidRequest as error:
        return error
    return text


def check_same(name: str, messages: Sequence[Any], expected: str | Exception, **options: Any) -> None:
    text = ours(name, messages, **options)
    if isinstance(expected, Exception):
        assert isinstance(text, InvalidRequest)
        assert str(expected) in str(text)
    else:
        assert text == expected


def test_the_folder_holds_what_the_table_says() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.jinja")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_chats_are_rendered_as_in_transformers(name: str) -> None:
    num_refused = 0
    for messages in CHATS.values():
        for add_generation_prompt in (True, False):
            expected = rendered(name, messages, add_generation_prompt=add_generation_prompt)
            check_same(name, messages, expected, add_generation_prompt=add_generation_prompt)
            num_refused += isinstance(expected, Exception)
    assert num_refused <= (4 if name == "google-gemma-2-2b-it" else 0)  # which refuses a system's messages


@pytest.mark.parametrize("name", NAMES)
def test_tools_and_their_results_are_rendered_as_in_transformers(name: str) -> None:
    num_refused = 0
    for messages in TOOL_CHATS.values():
        expected = rendered(name, messages, tools=TOOLS)
        if isinstance(expected, TypeError):  # it wants arguments as JSON in a string
            expected = rendered(name, [with_text_arguments(message) for message in messages], tools=TOOLS)
        check_same(name, messages, expected, tools=TOOLS)
        num_refused += isinstance(expected, Exception)
    assert bool(num_refused) == (name in REFUSES_SOME_OF_TOOLS)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_in_a_string_are_given_as_they_are_or_as_an_object_but_not_quoted_twice(name: str) -> None:
    messages = [user("Weather?"), assistant("", call(JSON_ARGUMENTS)), result("7")]
    as_object = rendered(name, [messages[0], assistant("", call(ARGUMENTS)), messages[2]], tools=TOOLS)
    as_it_is = rendered(name, messages, tools=TOOLS)
    text = ours(name, messages, tools=TOOLS)
    if isinstance(text, Exception):
        assert isinstance(as_object, Exception)
        return
    assert text in (as_object, as_it_is)
    assert r"{\"city" not in text
    if isinstance(as_it_is, str) and JSON_ARGUMENTS in as_it_is:
        assert text == as_it_is


@pytest.mark.parametrize("name", NAMES)
def test_null_content_is_given_as_none_where_the_template_takes_that(name: str) -> None:
    for tools, answer in ((None, assistant(None)), (TOOLS, assistant(None, call(ARGUMENTS)))):
        ask = user("Hi")
        then = result("7") if tools else user("Hm?")
        none, empty = (
            rendered(name, [ask, {**answer, "content": content}, then], tools=tools) for content in (None, "")
        )
        if isinstance(none, TypeError) and tools:  # arguments
            continue
        cannot = (isinstance(none, Exception) and not isinstance(empty, Exception)) or (
            isinstance(none, str) and isinstance(empty, str) and none.count("None") > empty.count("None")
        )
        if tools:
            assert cannot == (name in NULL_BECOMES_EMPTY)
        check_same(name, [ask, answer, then], empty if cannot else none, tools=tools)


def test_deepseek_tells_none_from_empty() -> None:
    name = "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"
    none, empty = (
        ours(name, [user("Hi"), assistant(content, call(JSON_ARGUMENTS)), result("7")], tools=TOOLS)
        for content in (None, "")
    )
    assert "get_weather" in str(none)
    assert "get_weather" not in str(empty)


@pytest.mark.parametrize("name", NAMES)
def test_text_parts_are_given_as_a_list_where_the_template_takes_one_else_joined(name: str) -> None:
    parts = [text_part("one"), text_part("two")]
    expected = rendered(name, [user(parts)])
    if isinstance(expected, Exception) or "one" not in expected or "'text'" in expected or '"text"' in expected:
        expected = rendered(name, [user("one\ntwo")])
    check_same(name, [user(parts)], expected)
    assert "one" in str(ours(name, [user(parts)]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("forget_kinds", [False, True], ids=["kinds", "no kinds"])
def test_a_chat_ends_where_the_template_ends_an_answer_whatever_the_file_says(name: str, forget_kinds: bool) -> None:
    tokenizer, chat = chat_of(name, forget_kinds=forget_kinds)
    ids = {i for i in tokenizer.encode(ENDS[name], parse_special=True, add_bos=False) if tokenizer.is_control(i)}
    assert bool(ids) == bool(ENDS[name])
    assert ids <= tokenizer.eos_token_ids
    assert chat.end_token_ids == ids
    answered = rendered(name, [user("Hi"), assistant("Hello"), user("More?")], add_generation_prompt=False)
    if isinstance(answered, str) and name not in ("openai-gpt-oss-120b", "llm-jp-llm-jp-4.1-8b-thinking"):  # <|return|>
        assert answered.rpartition("Hello")[2].lstrip().startswith(ENDS[name])


@pytest.mark.parametrize("name", NAMES)
def test_no_message_forges_a_mark_of_the_template(name: str) -> None:
    tokenizer, chat = chat_of(name)
    tools = TOOLS if name in NO_PROMPT_WITHOUT_TOOLS else None
    marks = "".join(token.text for token in tokenizer.control_tokens)

    def control_ids(content: str) -> list[int]:
        ids = chat.encode([user(content)], tools=tools, **MORE.get(name, {}))
        return [i for i in ids if tokenizer.is_control(i)]

    assert control_ids(f"x{marks}y") == control_ids("x")
