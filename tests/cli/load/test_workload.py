"""What is asked and when: the same for the same seed, and distributed as promised."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.distributions import Lengths
from octavo.cli.load.arrivals import Arrivals
from octavo.cli.load.plan import Plan
from octavo.cli.load.prompts import ID_RANGE, PromptMaker, TextScale
from octavo.cli.load.trace import TraceEntry, read_trace
from octavo.cli.load.workload import Asker, Workload
from octavo.core.errors import ConfigError

IDS, TEXT = PromptMaker("ids"), PromptMaker("text", TextScale(1.5, 20.0, is_measured=True))


def asker(maker: PromptMaker = IDS, endpoint: Any = "completions", seed: int = 0) -> Asker:
    return Asker(endpoint=endpoint, maker=maker, seed=seed)


def plan(**changes: Any) -> Plan:
    fields: dict[str, Any] = {
        "workload": Workload(prompt_tokens=Lengths(40, 50), output_tokens=Lengths(3, 5)),
        "arrivals": Arrivals(concurrency=4),
        "num_requests": 30,
    }
    return Plan(**(fields | changes))


@pytest.mark.parametrize("who", [asker(), asker(TEXT), asker(TEXT, "chat")])
def test_the_same_seed_asks_the_same_and_another_seed_something_else(who: Asker) -> None:
    first = list(plan().requests(who))
    assert first == list(plan().requests(who))
    other = list(plan().requests(Asker(endpoint=who.endpoint, maker=who.maker, seed=1)))
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))
    assert len({json.dumps(request.prompt) for request in first}) == 30
    assert {request.output_tokens for request in first} == {3, 4, 5}


def test_prompts_as_ids_have_exactly_the_tokens_asked() -> None:
    for request in plan().requests(asker()):
        ids = request.prompt["prompt"]
        assert len(ids) == request.asked_prompt_tokens
        assert all(ID_RANGE.low <= token <= ID_RANGE.high for token in ids)


def test_prompts_as_text_have_as_many_words_as_the_server_makes_those_tokens_of() -> None:
    words = TEXT.make(320, random.Random(0))
    assert isinstance(words, str)
    assert len(words.split()) == 200  # 20 tokens of overhead, 1.5 a word
    part = TEXT.make(320, random.Random(0), is_part=True)
    assert isinstance(part, str)
    assert len(part.split()) == 213
    assert TextScale.fit((16, 44), (144, 236)) == TextScale(1.5, 20.0, is_measured=True)
    assert TextScale.fit((16, 44), (144, 44)) == TextScale()  # a server that does not count
    assert TEXT.make(1, random.Random(0)) != ""


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_requests_of_a_group_share_their_prefix_and_nothing_more(endpoint: Any) -> None:
    workload = Workload(prompt_tokens=Lengths(50, 50), output_tokens=Lengths(1, 1), shared_prefix=40, prefix_groups=2)
    maker = IDS if endpoint == "completions" else PromptMaker("text")
    asked = [request.prompt for request in plan(workload=workload).requests(asker(maker, endpoint))]
    if endpoint == "chat":
        prefixes = [prompt["messages"][0]["content"] for prompt in asked]
        own = [prompt["messages"][1]["content"] for prompt in asked]
        assert {prompt["messages"][0]["role"] for prompt in asked} == {"system"}
    else:
        prefixes = [str(prompt["prompt"][:40]) for prompt in asked]
        own = [str(prompt["prompt"][40:]) for prompt in asked]
        assert {len(prompt["prompt"]) for prompt in asked} == {90}
    assert len(set(prefixes)) == 2
    assert prefixes[::2] == [prefixes[0]] * 15
    assert len(set(own)) == 30


def gaps(burstiness: float, seed: int = 3) -> list[float]:
    times = list(itertools.islice(Arrivals(rate=20.0, burstiness=burstiness).times_s(seed), 20_001))
    assert times[0] == 0
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_have_the_rates_mean_and_the_burstiness_variance(burstiness: float) -> None:
    found = gaps(burstiness)
    assert statistics.mean(found) == pytest.approx(1 / 20, rel=0.04)
    # a gamma distribution of shape k has a coefficient of variation of k ** -0.5; Poisson: 1
    assert statistics.pstdev(found) / statistics.mean(found) == pytest.approx(burstiness**-0.5, rel=0.04)


def test_poisson_gaps_are_exponential() -> None:
    found = gaps(1.0)
    for times in (0.5, 1, 2):
        share = sum(gap > times / 20 for gap in found) / len(found)
        assert share == pytest.approx(2.718281828**-times, abs=0.015)


def test_arrivals_repeat_with_their_seed_only() -> None:
    assert gaps(1.0) == gaps(1.0)
    assert gaps(1.0) != gaps(1.0, seed=4)


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_a_trace_is_read_in_order_of_arrival_and_played_at_a_speed(tmp_path: Path) -> None:
    file = written(
        tmp_path / "trace.jsonl",
        {"arrival_s": 2, "prompt_tokens": 7, "output_tokens": 3, "prefix_group": "a", "prefix_tokens": 5},
        "",
        {"arrival_s": 0.5, "prompt": [4, 5, 6], "output_tokens": 1, "fields": {"temperature": 1.0}},
        {"arrival_s": 4.0, "prompt_tokens": 2, "output_tokens": 3, "prefix_group": "a", "prefix_tokens": 4},
        {"arrival_s": 3.0, "prompt": "a text", "output_tokens": 2},
    )
    entries = read_trace(file, "completions")
    played = plan(trace=entries, num_requests=4, speed=2.0, arrivals=Arrivals())
    assert played.times_s() == [0.25, 1.0, 1.5, 2.0]
    given, first, text, second = played.requests(asker())
    assert (given.prompt, given.fields, given.output_tokens) == ({"prompt": [4, 5, 6]}, {"temperature": 1.0}, 1)
    assert (text.prompt, text.asked_prompt_tokens) == ({"prompt": "a text"}, None)
    assert (first.asked_prompt_tokens, len(first.prompt["prompt"]), len(second.prompt["prompt"])) == (12, 12, 6)
    assert first.prompt["prompt"][:4] == second.prompt["prompt"][:4]
    assert first.prompt["prompt"][4] != second.prompt["prompt"][4]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", r"line 2: not JSON \(Expecting"),
        ("[]", "line 2: .* is no object"),
        ({"prompt_tokens": 1, "output_tokens": 1}, "arrival_s is null but must be a number of seconds"),
        ({"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 1}, "arrival_s is -1 "),
        ('{"arrival_s": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival_s is NaN "),
        ({"arrival_s": 0, "output_tokens": 1}, "needs one of prompt_tokens, prompt and messages, not none"),
        ({"arrival_s": 0, "prompt": "a", "prompt_tokens": 1, "output_tokens": 1}, "not prompt_tokens and prompt"),
        ({"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 1}, "prompt_tokens is 0 but must be a whole number"),
        ({"arrival_s": 0, "prompt_tokens": 1}, "output_tokens is null but must be"),
        ({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": True}, "output_tokens is true but must be"),
        ({"arrival_s": 0, "prompt": [], "output_tokens": 1}, "prompt must be a text or a list of token ids"),
        ({"arrival_s": 0, "messages": ["a"], "output_tokens": 1}, "messages must be a list of objects"),
        ({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "prefix_group": "a"}, "belong together"),
        (
            {"arrival_s": 0, "prompt": "a", "output_tokens": 1, "prefix_group": "a", "prefix_tokens": 3},
            "prefix_group goes with prompt_tokens",
        ),
        ({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1, "fields": 3}, "fields is 3 but must be an object"),
        ({"arrival_s": 0, "messages": [{}], "output_tokens": 1}, "messages go with --endpoint chat"),
        ({"timestamp": 0, "prompt_tokens": 1, "output_tokens": 1}, "unknown key 'timestamp'; the keys are arrival_s"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_by_its_number(tmp_path: Path, line: Any, complaint: str) -> None:
    good = {"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}
    with pytest.raises(ConfigError, match=complaint) as caught:
        read_trace(written(tmp_path / "trace.jsonl", good, line, good), "completions")
    assert "trace.jsonl, line 2: " in str(caught.value)


def test_a_trace_that_is_not_there_or_empty_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the trace .*: No such file"):
        read_trace(tmp_path / "none.jsonl", "chat")
    with pytest.raises(ConfigError, match="is empty; it needs one JSON object per line"):
        read_trace(written(tmp_path / "trace.jsonl", ""), "chat")
    (tmp_path / "trace.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "trace.jsonl", "chat")


def test_a_fixed_length_is_not_asked_of_answers_in_form() -> None:
    entry = TraceEntry(prompt_tokens=3, arrival_s=0.0, output_tokens=9, fields={"response_format": {}})
    (request,) = plan(trace=[entry], num_requests=1).requests(asker())
    assert not request.has_fixed_length
    assert all(request.has_fixed_length for request in plan().requests(asker()))


def test_a_trace_of_chats_is_asked_as_it_is(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]
    file = written(tmp_path / "t.jsonl", {"arrival_s": 3.0, "messages": messages, "output_tokens": 2})
    entries = read_trace(file, "chat")
    (request,) = plan(trace=entries, num_requests=9).requests(asker(TEXT, "chat"))
    assert json.loads(json.dumps(request.prompt)) == {"messages": messages}
    ids = written(tmp_path / "t.jsonl", {"arrival_s": 3.0, "prompt": [1], "output_tokens": 2})
    with pytest.raises(ConfigError, match="line 1: a prompt of token ids goes with --endpoint completions"):
        read_trace(ids, "chat")
