"""One request's figures, from bytes and times that are given: no clock runs here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub import DONE, chat_event, event, text_event, usage_event

from octavo.cli.load.sample import AnswerRecorder, Sample, error_message


def sample_of(
    pieces: Sequence[tuple[float, bytes]],
    *,
    expect: Any = None,
    status: int = 200,
    kind: str = "text/event-stream; x=y",
) -> Sample:
    """The sample of an answer whose body arrives so; the last time is also its end. Due at 10 s."""
    sample = Sample(index=0, group="", asked_prompt_tokens=5, asked_output_tokens=4, arrival_s=10.0)
    recorder = AnswerRecorder(sample, expect)
    recorder.on_response(status, kind)
    for now_s, body in pieces:
        recorder.on_body(body, now_s)
    recorder.close(pieces[-1][0] if pieces else 10.0)
    return sample


FOUR = [
    (11.0, text_event("a")),
    (11.5, text_event("b")),
    (12.5, text_event("c")),
    (13.0, text_event("d", "length")),
    (13.1, usage_event(5, 4) + DONE),
]


def test_every_figure_follows_from_the_times_of_the_events() -> None:
    sample = sample_of(FOUR)
    assert sample.failure is None
    assert sample.ttft_s == 1.0
    assert sample.itl_s == [0.5, 1.0, 0.5]
    assert sample.tpot_s == pytest.approx(2.0 / 3)
    assert sample.e2e_s == pytest.approx(3.1)
    assert (sample.prompt_tokens, sample.output_tokens, sample.counted_by) == (5, 4, "usage")
    assert sample.finish_reason == "length"


def test_the_first_token_is_the_first_output_not_the_first_event() -> None:
    opening = [(10.5, chat_event(role="assistant", content="")), (11.0, chat_event(content="a"))]
    assert sample_of([*opening, (12.0, chat_event("stop", content="b") + DONE)]).ttft_s == 1.0
    thinking = [(10.5, chat_event(reasoning_content="hm")), (11.0, chat_event(content="a"))]
    assert sample_of([*thinking, (12.0, chat_event("stop") + DONE)]).ttft_s == 0.5
    calling = [(10.5, chat_event(tool_calls=[{"index": 0, "id": "x", "function": {"name": "f", "arguments": ""}}]))]
    assert sample_of([*calling, (12.0, chat_event("tool_calls") + DONE)]).ttft_s == 0.5


def test_events_that_come_in_one_read_have_no_gap_between_them() -> None:
    sample = sample_of([(11.0, text_event("a") + text_event("b")), (12.0, text_event("c", "stop") + DONE)])
    assert sample.event_times_s == [11.0, 11.0, 12.0]
    assert sample.itl_s == [1.0]
    assert sample.tpot_s == 1.0  # one token after the first arrival, which held two


def test_an_event_of_several_tokens_is_one_gap_and_all_its_tokens() -> None:
    told = [(11.0, text_event("abc", token_ids=[1, 2, 3])), (13.0, text_event("de", "stop", token_ids=[4, 5]) + DONE)]
    sample = sample_of(told)
    assert (sample.output_tokens, sample.counted_by) == (5, "events' own counts")
    assert sample.itl_s == [2.0]
    assert sample.tpot_s == 1.0  # two tokens came after the first arrival
    untold = sample_of([(11.0, text_event("abc")), (13.0, text_event("de", "stop") + usage_event(5, 6) + DONE)])
    assert untold.event_tokens == [None, None]
    assert untold.tpot_s == pytest.approx(2.0 / 3)  # six tokens spread evenly: three after the first arrival


@pytest.mark.parametrize(
    "logprobs",
    [{"tokens": ["a", "b"], "token_logprobs": [0, 0]}, {"content": [{"token": "a"}, {"token": "b"}]}],
)
def test_logprobs_say_how_many_tokens_an_event_holds(logprobs: Any) -> None:
    sample = sample_of([(11.0, text_event("ab", logprobs=logprobs)), (12.0, text_event("c", "stop") + DONE)])
    assert sample.event_tokens == [2, None]
    assert (sample.output_tokens, sample.counted_by) == (3, "events")


def test_usage_in_every_chunk_says_it_too_but_a_total_on_the_last_is_not_one_events() -> None:
    def with_usage(text: str, completion: int, finish: str | None = None) -> bytes:
        usage = {"prompt_tokens": 5, "completion_tokens": completion}
        return event({"choices": [{"text": text, "finish_reason": finish}], "usage": usage})

    growing = [(11.0, with_usage("a", 1)), (12.0, with_usage("bcd", 4)), (13.0, with_usage("e", 5, "stop") + DONE)]
    assert sample_of(growing).event_tokens == [1, 3, 1]
    total = [(11.0, text_event("a")), (12.0, text_event("b")), (13.0, with_usage("c", 3, "stop") + DONE)]
    assert sample_of(total).event_tokens == [None, None, None]


def test_an_event_of_tokens_that_are_no_text_yet_is_output() -> None:
    sample = sample_of([(11.0, text_event("", token_ids=[7])), (12.0, text_event("é", "stop", token_ids=[8]) + DONE)])
    assert (sample.ttft_s, sample.event_tokens) == (1.0, [1, 1])


def test_an_answer_that_comes_at_once_has_no_tpot_and_no_gaps() -> None:
    sample = sample_of([(11.0, text_event("abcd", "length") + usage_event(5, 4) + DONE)])
    assert (sample.tpot_s, sample.itl_s, sample.output_tokens, sample.failure) == (None, [], 4, None)


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ([(11.0, text_event("a"))], "truncated"),
        ([(11.0, text_event("a") + b'data: {"choi')], "truncated"),
        ([(11.0, text_event("", "stop") + DONE)], "empty"),
        ([(11.0, DONE)], "empty"),
        ([], "truncated"),
        ([(11.0, text_event("a") + event({"error": {"message": "the engine died"}}) + DONE)], "error event"),
    ],
)
def test_an_answer_that_is_none_is_a_failure_of_its_kind(pieces: Any, failure: str) -> None:
    assert sample_of(pieces).failure == failure


@pytest.mark.parametrize("end", [text_event("b", "stop"), DONE, DONE.rstrip()])
def test_either_a_finish_reason_or_done_is_an_end(end: bytes) -> None:
    assert sample_of([(11.0, text_event("a") + end)]).failure is None


@pytest.mark.parametrize(
    "body",
    [
        b"data: {nonsense\n\n",
        b"data: 5\n\n",
        b'data: {"choices": [3]}\n\n',
        b'data: {"choices": 3}\n\n',
        b"data: [1]\n\n",
    ],
)
def test_what_is_no_stream_of_json_objects_raises_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        sample_of([(11.0, body)])


def test_a_status_or_an_answer_that_is_no_stream_is_a_failure_with_its_message() -> None:
    refused = sample_of([(11.0, b'{"error": {"message": "no tools here"}}')], status=400, kind="application/json")
    assert (refused.failure, refused.status, refused.message) == ("status", 400, "no tools here")
    whole = sample_of([(11.0, b'{"choices": []}')], kind="application/json")
    assert whole.failure == "protocol"
    assert "text/event-stream" in whole.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "m", "type": "t"}}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"object": "error", "message": "m"}', "m"),
        (b'{"detail": [{"loc": ["body"]}]}', '[{"loc": ["body"]}]'),
        (b"<html>\n no\n way </html>", "<html> no way </html>"),
        (b"\xff", "\ufffd"),
        (b"", ""),
    ],
)
def test_the_message_of_an_error_is_found_in_every_usual_form(body: bytes, message: str) -> None:
    assert error_message(body) == message


def test_answers_in_form_are_told_from_others() -> None:
    good = [(11.0, chat_event(content='{"a"')), (12.0, chat_event("stop", content=": 1}") + DONE)]
    assert sample_of(good, expect="json").valid_json is True
    assert sample_of(good[1:], expect="json").valid_json is False

    def call(index: int, arguments: str) -> dict[str, Any]:
        return {"index": index, "function": {"arguments": arguments}}

    calls = [
        (11.0, chat_event(tool_calls=[call(0, '{"c": ')])),
        (12.0, chat_event(tool_calls=[call(0, "1}"), call(1, "{}")])),
        (13.0, chat_event("tool_calls") + DONE),
    ]
    assert sample_of(calls, expect="tool_calls").valid_json is True
    assert sample_of([calls[0], calls[2]], expect="tool_calls").valid_json is False
    assert sample_of(good, expect="tool_calls").valid_json is False  # text where a call was wanted


@given(st.lists(st.integers(0, 1000), max_size=10))
def test_a_sample_does_not_depend_on_how_its_bytes_are_cut_but_for_times(cuts: list[int]) -> None:
    whole = b"".join(body for _, body in FOUR)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [(11.0 + start, whole[start:end]) for start, end in itertools.pairwise(places)]
    sample = sample_of(pieces)
    assert (sample.output_tokens, sample.prompt_tokens, sample.finish_reason) == (4, 5, "length")
    assert len(sample.event_times_s) == 4
    assert sample.event_times_s == sorted(sample.event_times_s)
    assert sample.failure is None


def test_a_sample_can_be_written_and_read_back() -> None:
    import dataclasses

    sample = sample_of(FOUR)
    assert Sample(**json.loads(json.dumps(dataclasses.asdict(sample)))) == sample
