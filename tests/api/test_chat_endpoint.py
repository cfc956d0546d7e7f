"""POST /v1/chat/completions, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest
from live_server import LiveServer
from wire import ANSWER, HELLO, answer_of, chat, error_of, events_of


def test_an_answer_has_the_fields_that_openai_documents(server: LiveServer) -> None:
    server.engine.cached_tokens = 5
    body = answer_of(chat(server.http))
    assert body["object"] == "chat.completion"
    assert body["model"] == "fake"
    assert body["system_fingerprint"] == "fp_fake"
    assert body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    num_prompt, num_output = 1 + len("user:hello\n"), len(ANSWER.encode()) + 1
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stream_is_a_role_then_text_then_an_end(server: LiveServer) -> None:
    events = events_of(chat(server.http, stream=True))
    assert len({(e["id"], e["created"], e["model"], e["object"], e["system_fingerprint"]) for e in events}) == 1
    assert events[0]["object"] == "chat.completion.chunk"
    assert all("usage" not in event for event in events)
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(c["delta"]["content"] for c in choices[1:-1]) == ANSWER
    assert all(c["delta"]["content"] for c in choices[1:-1])


def test_a_stream_and_its_whole_answer_say_the_same(server: LiveServer) -> None:
    fields: dict[str, Any] = {"n": 3, "logprobs": True, "top_logprobs": 2, "return_token_ids": True, "max_tokens": 15}
    whole = answer_of(chat(server.http, **fields))
    events = events_of(chat(server.http, stream=True, stream_options={"include_usage": True}, **fields))
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(p["delta"].get("content", "") for p in parts) == choice["message"]["content"]
        assert [t for p in parts for t in p.get("token_ids", ())] == choice["token_ids"]
        entries = [t for p in parts if p["logprobs"] for t in p["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
    assert events[-1]["usage"] == whole["usage"]
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert sum("prompt_token_ids" in event for event in events) == 1


def test_usage_in_a_stream_is_one_chunk_without_choices_and_null_before(server: LiveServer) -> None:
    *before, last = events_of(chat(server.http, stream=True, n=2, stream_options={"include_usage": True}))
    assert [event["usage"] for event in before] == [None] * len(before)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2 * (len(ANSWER.encode()) + 1)  # the prompt counts once
    assert last["usage"]["prompt_tokens"] == 1 + len("user:hello\n")


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_left_out_of_a_stream_unless_asked_for(server: LiveServer, options: Any) -> None:
    assert all("usage" not in event for event in events_of(chat(server.http, stream=True, stream_options=options)))


def test_bytes_of_logprobs_join_to_the_text_though_tokens_split_characters(server: LiveServer) -> None:
    body = answer_of(chat(server.http, logprobs=True))
    entries = body["choices"][0]["logprobs"]["content"]
    joined = bytes(byte for entry in entries if entry["bytes"] is not None for byte in entry["bytes"])
    assert joined.decode() == ANSWER
    assert entries[-1] == {"token": "<|eos|>", "logprob": -0.5, "bytes": None, "top_logprobs": []}
    assert entries[2]["token"] == "bytes:\\xc3"


def test_text_with_line_separators_survives_clients_that_split_lines(server: LiveServer) -> None:
    text = 'a\u2028b\u2029c\x85d\x0be\x1cf\r\ng"\\'
    server.engine.answer = lambda request: text
    response = chat(server.http, stream=True)
    events_of(response)
    assert all(line == "" or line.startswith("data: ") for line in response.text.splitlines())
    assert answer_of(chat(server.http))["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize("limit", [-1, 600, 2**31])
def test_a_limit_is_refused_under_the_name_that_the_client_gave_it(server: LiveServer, limit: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        error = error_of(chat(server.http, **{name: limit}), 400)
        assert error["param"] == name
        assert name in error["message"]
        assert name == "max_tokens" or "max_tokens" not in error["message"]


def test_max_completion_tokens_supersedes_max_tokens(server: LiveServer) -> None:
    assert answer_of(chat(server.http, max_tokens=9, max_completion_tokens=4))["usage"]["completion_tokens"] == 4
    assert error_of(chat(server.http, max_completion_tokens=-1), 400)["param"] == "max_completion_tokens"


def test_without_a_limit_the_answer_may_fill_the_context(server: LiveServer) -> None:
    body = answer_of(chat(server.http, ignore_eos=True))
    assert body["usage"]["total_tokens"] == 512
    assert body["choices"][0]["finish_reason"] == "length"


def test_what_ended_an_answer_is_its_stop_reason(server: LiveServer) -> None:
    by_string = answer_of(chat(server.http, stop=["e,", "nothing"]))["choices"][0]
    assert (by_string["finish_reason"], by_string["stop_reason"]) == ("stop", "e,")
    assert by_string["message"]["content"] == "Grüß"
    by_token = answer_of(chat(server.http, stop_token_ids=[ord(",")]))["choices"][0]
    assert (by_token["finish_reason"], by_token["stop_reason"]) == ("stop", ord(","))
    last = events_of(chat(server.http, stop="e,", include_stop_str_in_output=True, stream=True))[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", "e,")


def test_prompt_logprobs_are_null_first_and_then_ranked(server: LiveServer) -> None:
    body = answer_of(chat(server.http, prompt_logprobs=2, max_tokens=1))
    prompt = b"user:hello\n"
    assert len(body["prompt_logprobs"]) == 1 + len(prompt)
    assert body["prompt_logprobs"][0] is None
    assert body["prompt_logprobs"][1] == {
        str(prompt[0]): {"logprob": -0.5, "rank": 1, "decoded_token": "u"},
        str(prompt[0] + 1): {"logprob": -0.75, "rank": 2, "decoded_token": "v"},
    }


def test_content_parts_and_names_are_kept_and_an_assistant_may_have_said_nothing(server: LiveServer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: list[dict[str, Any]] = [{"role": "developer", "content": "s"}, {"role": "assistant", "content": None}]
    messages += [{"role": "assistant"}, {"role": "user", "content": parts, "name": "Ann"}]
    answer_of(chat(server.http, messages=messages))
    assert list(server.engine.chats[0][0]) == [
        {"role": "developer", "content": "s"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "content": parts, "name": "Ann"},
    ]


def test_an_answer_can_be_sent_back_as_it_came(server: LiveServer) -> None:
    message = answer_of(chat(server.http))["choices"][0]["message"]
    extras = {"tool_calls": None, "function_call": None, "annotations": [], "audio": None}
    answer_of(chat(server.http, messages=[*HELLO, message | extras, *HELLO]))
    assert server.engine.chats[-1][0][1] == {"role": "assistant", "content": ANSWER}


def test_template_arguments_reach_the_template(server: LiveServer) -> None:
    answer_of(chat(server.http, chat_template_kwargs={"enable_thinking": False}, add_generation_prompt=False))
    assert server.engine.chats[-1][1] == {"enable_thinking": False, "add_generation_prompt": False}
    parts = [{"type": "text", "text": "Well"}, {"type": "text", "text": "so, "}]
    body = answer_of(
        chat(
            server.http,
            messages=[*HELLO, {"role": "assistant", "content": parts}],
            continue_final_message=True,
            echo=True,
        )
    )
    assert bytes(server.engine.requests[-1].prompt_token_ids[1:]) == b"user:hello\nWell\nso, "
    assert body["choices"][0]["message"]["content"] == "Well\nso, " + ANSWER
    going_on = [*HELLO, {"role": "assistant", "content": "Well, "}]
    body = answer_of(chat(server.http, messages=going_on, continue_final_message=True, echo=True))
    assert server.engine.chats[-1] == (tuple(HELLO), {"add_generation_prompt": True})
    assert bytes(server.engine.requests[-1].prompt_token_ids[1:]) == b"user:hello\nWell, "
    assert body["choices"][0]["message"]["content"] == "Well, " + ANSWER


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": "x", "colour": 1}]}, "messages[1].colour"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [7]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"continue_final_message": True, "messages": [{"role": "assistant", "content": "x"}]},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs"),
        ({"prompt": "x"}, "prompt"),
        ({"max_tokens": 600}, "max_tokens"),
        ({"max_completion_tokens": 600}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ],
)
def test_a_bad_field_is_refused_by_name(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    assert error_of(chat(server.http, **fields), 400)["param"] == param
    assert server.engine.requests == []


def test_a_prompt_beyond_the_context_says_so_in_the_words_that_clients_look_for(server: LiveServer) -> None:
    for fields in ({"messages": [{"role": "user", "content": "x" * 600}]}, {"max_tokens": 600}):
        error = error_of(chat(server.http, **fields), 400)
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]


def test_a_model_without_a_template_says_what_to_do(server: LiveServer) -> None:
    server.engine.has_chat_template = False
    try:
        assert error_of(chat(server.http), 400)["param"] == "messages"
    finally:
        server.engine.has_chat_template = True
