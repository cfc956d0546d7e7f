"""POST /v1/completions, over a real socket."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import START
from live_server import LiveServer
from wire import ANSWER, answer_of, complete, error_of, events_of


def test_the_four_forms_of_a_prompt_reach_the_engine_alike(server: LiveServer) -> None:
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        body = answer_of(complete(server.http, prompt))
        assert body["object"] == "text_completion"
        assert body["choices"][0]["text"] == ANSWER[: len(body["choices"][0]["text"])]
    assert {request.prompt_token_ids for request in server.engine.requests} == {(97, 98)}


def test_choices_of_several_prompts_are_numbered_prompt_major(server: LiveServer) -> None:
    server.engine.answer = lambda request: f"{bytes(request.prompt_token_ids).decode()}{request.choice_index}"
    expected = ["a0", "a1", "b0", "b1", "c0", "c1"]
    body = answer_of(complete(server.http, ["a", "b", "c"], n=2))
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert [choice["text"] for choice in body["choices"]] == expected
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6 * 3
    texts = [""] * 6
    events = events_of(complete(server.http, ["a", "b", "c"], n=2, stream=True, stream_options={"include_usage": True}))
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert events[-1]["usage"] == body["usage"]


def test_the_default_limit_is_16_tokens_or_what_the_context_leaves(server: LiveServer) -> None:
    assert answer_of(complete(server.http, ignore_eos=True))["usage"]["completion_tokens"] == 16
    assert answer_of(complete(server.http, [97] * 509, ignore_eos=True))["usage"]["completion_tokens"] == 3
    error = error_of(complete(server.http, [97] * 512), 400)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded"), "nobody has asked for max_tokens"
    assert error_of(complete(server.http, [97] * 512), 400)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("prompt", ["héllo", "a<|start|>b", [104, 195, 169], [104, START, 105]])
def test_text_offsets_index_the_text_that_came_with_them(server: LiveServer, prompt: Any) -> None:
    choice = answer_of(complete(server.http, prompt, echo=True, logprobs=1, max_tokens=12))["choices"][0]
    text, logprobs = choice["text"], choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if token == "<|start|>":
            assert not isinstance(prompt, str) or text.startswith(token, offset)
        elif not token.startswith("bytes:"):
            assert text.startswith(token, offset), (token, offset, text)
        else:
            assert not text[offset].isascii()
    assert {len(column) for column in logprobs.values()} == {len(logprobs["tokens"])}


def test_a_prompt_can_be_scored_without_generating(server: LiveServer) -> None:
    body = answer_of(complete(server.http, "abc", echo=True, max_tokens=0, logprobs=2))
    assert body["choices"][0] == {
        "index": 0,
        "text": "abc",
        "logprobs": {
            "tokens": ["a", "b", "c"],
            "token_logprobs": [None, -0.5, -0.5],
            "top_logprobs": [None, {"b": -0.5, "c": -0.75}, {"c": -0.5, "d": -0.75}],
            "text_offset": [0, 1, 2],
        },
        "finish_reason": "length",
        "stop_reason": None,
    }
    assert body["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_stream_and_its_whole_answer_say_the_same(server: LiveServer, n: int, logprobs: int | None) -> None:
    fields = {"n": n, "logprobs": logprobs, "echo": True, "return_token_ids": True, "max_tokens": 9}
    whole = answer_of(complete(server.http, ["hé", "x" * 200], **fields))
    events = events_of(complete(server.http, ["hé", "x" * 200], stream=True, **fields))
    for choice in whole["choices"]:
        parts = [c for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert [t for part in parts for t in part["token_ids"]] == choice["token_ids"]
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [
            choice["prompt_token_ids"]
        ]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            for name, column in choice["logprobs"].items():
                assert [item for part in parts for item in part["logprobs"][name]] == column


def test_every_choice_shows_the_logprobs_of_its_echoed_prompt(server: LiveServer) -> None:
    body = answer_of(complete(server.http, "abc", echo=True, logprobs=0, n=3, max_tokens=1))
    assert [c["logprobs"]["token_logprobs"] for c in body["choices"]] == [[None, -0.5, -0.5, -0.5]] * 3


def test_prompt_logprobs_without_echo_come_beside_the_text(server: LiveServer) -> None:
    body = answer_of(complete(server.http, ["ab", "c"], prompt_logprobs=1, n=2, max_tokens=1))
    expected = [None, {"98": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]
    assert [c["prompt_logprobs"] for c in body["choices"]] == [expected, expected, [None], [None]]


def test_all_sampling_fields_reach_the_engine(server: LiveServer) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "typical_p": 0.8, "xtc_probability": 0.25,
        "xtc_threshold": 0.2, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 64, "max_tokens": 5,
        "min_tokens": 2, "stop": ("z",), "stop_token_ids": (1, 2), "include_stop_str_in_output": True,
        "ignore_eos": True, "logprobs": 3, "allowed_token_ids": (97, 98),
    }  # fmt: skip
    words = {"bad_words": ["no", " never"], "dry_sequence_breakers": ["\n", "ab"], "logit_bias": {"97": 1, "98": -2.5}}
    error = error_of(complete(server.http, **given, **words), 400)
    assert error["param"] == "dry_sequence_breakers"  # no token of the fake tokenizer has two letters
    words["dry_sequence_breakers"] = ["\n", "a"]
    answer_of(complete(server.http, **given, **words, priority=-3, cache_salt="s"))
    request = server.engine.requests[0]
    for name, value in given.items():
        assert getattr(request.sampling, name) == value, name
    assert request.sampling.logit_bias == ((97, 1.0), (98, -2.5))
    assert request.sampling.dry_sequence_breaker_ids == (10, 97)
    assert request.sampling.bad_words_token_ids == tuple(tuple(w.encode()) for w in ("no", " no", " never"))
    assert request.priority == -3
    assert request.cache_salt


def test_null_means_absent_for_every_field(server: LiveServer) -> None:
    from octavo.api.field_policy import NO_OPS, UNSUPPORTED
    from octavo.api.schemas_completions import CompletionRequest

    names = set(CompletionRequest.model_fields) | set(NO_OPS) | set(UNSUPPORTED) - {"prompt"}
    nulls: dict[str, Any] = dict.fromkeys(names - {"prompt"})
    assert answer_of(complete(server.http, **nulls))["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1, 2.0]]}, "prompt"),
        ({"prompt": [260]}, "prompt"),
        ({"prompt": [300], "echo": True}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 200, "n": 16}, "n"),
        ({"prompt": ""}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2**31}, "n"),
        ({"n": 1.0}, "n"),
        ({"n": True}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 10**400}, "seed"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": [7]}, "stop[0]"),
        ({"stop": 7}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"97": 101}}, "logit_bias"),
        ({"logit_bias": {"97": "1"}}, "logit_bias[0][1]"),
        ({"logit_bias": {"97": 1, "097": 1}}, "logit_bias"),
        ({"logit_bias": {"-0": 1}}, "logit_bias"),
        ({"logit_bias": {"260": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"stop_token_ids": [260]}, "stop_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1] * 4097}, "allowed_token_ids"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 512}, "max_tokens"),
        ({"min_tokens": 20}, "min_tokens"),
        ({"priority": 2**40}, "priority"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"colour": 1}}, "stream_options.colour"),
        ({"stream": True, "stream_options": []}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": 1}, "echo"),
        ({"messages": []}, "messages"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(server: LiveServer, fields: dict[str, Any], param: str) -> None:
    error = error_of(complete(server.http, **fields), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert server.engine.requests == [] or server.engine.streams == set()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 2**31}, "n is 2147483648 but must be at most 16"),
        ({"max_tokens": 2**31}, "from 0 to 2147483647"),
        ({"min_tokens": 2**31}, "from 0 to 2147483647"),
        ({"top_k": 2**31}, "from 0 (off) to 2147483647"),
        ({"dry_penalty_last_n": 2**31}, "from -1 (all) to 2147483647"),
        ({"stop": 7}, "must be a string or a list"),
    ],
)
def test_a_refusal_names_the_limit_that_was_exceeded(server: LiveServer, fields: dict[str, Any], says: str) -> None:
    assert says in error_of(complete(server.http, **fields), 400)["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("suffix", "end"),
        ("guided_json", {}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("prediction", {}),
        ("web_search_options", {}),
        ("store", True),
        ("store", 0),
        ("skip_special_tokens", False),
        ("service_tier", "priority"),
        ("reasoning_effort", "low"),
        ("chat_template", "{{ messages }}"),
        ("use_beam_search", True),
        ("logits_processors", ["x"]),
        ("truncate_prompt_tokens", 5),
    ],
)
def test_what_is_known_but_not_supported_is_refused_by_name(server: LiveServer, name: str, value: Any) -> None:
    error = error_of(complete(server.http, **{name: value}), 400)
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "none", "functions": [], "response_format": {"type": "text"}, "suffix": ""},
        {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "parallel_tool_calls": True},
        {"safety_identifier": "s", "prompt_cache_key": "k", "best_of": 1, "skip_special_tokens": True, "top_k": -1},
        {"stream_options": None, "modalities": ["text"], "length_penalty": 1.0, "use_beam_search": False},
    ],
)
def test_harmless_values_are_accepted(server: LiveServer, fields: dict[str, Any]) -> None:
    answer_of(complete(server.http, **fields))


@pytest.mark.parametrize(
    ("name", "guess"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("repeat_penalty", "repetition_penalty"), ("zzz", "")],
)
def test_an_unknown_field_is_refused_with_a_guess(server: LiveServer, name: str, guess: str) -> None:
    error = error_of(complete(server.http, **{name: 1}), 400)
    assert error["param"] == name
    assert error["message"].endswith(f"did you mean {guess}?" if guess else name)


def test_one_bad_prompt_among_several_leaves_nothing_running(server: LiveServer) -> None:
    error_of(complete(server.http, [[97], [98], [260]]), 400)
    assert server.engine.streams == set()
    assert len(server.engine.aborted) == 2


def test_breakers_may_be_in_many_tokens_and_bad_words_are_one_job(server: LiveServer) -> None:
    words = [chr(ord("a") + i % 26) * (1 + i // 26) for i in range(128)]
    fields = {"dry_multiplier": 0.8, "dry_sequence_breakers": [" ", "\n", *"abcdefgh"], "bad_words": words}
    answer_of(complete(server.http, [5], **fields))
    (request,) = server.engine.requests
    assert request.sampling.dry_sequence_breaker_ids == tuple(sorted(b" \nabcdefgh"))
    assert len(request.sampling.bad_words_token_ids) == 256
    assert len(server.engine.encoding_for) == 1
    answer_of(complete(server.http, [5], **fields))
    first, second = server.engine.requests
    assert first.sampling.dry_sequence_breaker_ids is second.sampling.dry_sequence_breaker_ids
