"""``octavo bench serve`` against servers that oblige, refuse, lie, hang and leave."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub import (
    DONE,
    STREAM_HEAD,
    Answer,
    Stub,
    chat_event,
    chunk,
    event,
    obliging,
    plain,
    stream,
    stub_server,
    text_event,
    usage_event,
)
from typer.testing import CliRunner

from octavo.cli.load.runner import Runner
from octavo.cli.main import app
from octavo.core.errors import ConfigError, ServerUnusable


def bench(server: Stub | str, *words: str) -> Any:
    url = server if isinstance(server, str) else server.url
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["bench", "serve", "--url", url, *words])


def measured(tmp_path: Path, server: Stub, *words: str, exit_code: int = 0) -> tuple[str, Any]:
    """The report as one line, and the file's content."""
    file = tmp_path / "out.json"
    done = bench(server, *words, "--json", str(file))
    assert done.exit_code == exit_code, (done.output, done.exception)
    return " ".join(done.stdout.split()), json.loads(file.read_text())


def test_a_run_keeps_every_sample_and_its_figures_follow_from_them(tmp_path: Path) -> None:
    with stub_server() as server:
        words = ("--num-requests", "6", "--concurrency", "2", "--prompt-tokens", "20:30", "--output-tokens", "5")
        shown, result = measured(tmp_path, server, *words)
    assert "6 of 6 answered" in shown
    assert "30 tokens, " in shown
    requests = result["requests"]
    assert [request["index"] for request in sorted(requests, key=lambda r: r["index"])] == list(range(6))
    assert all(len(request["event_times_s"]) == len(request["event_tokens"]) == 5 for request in requests)
    assert all(request["arrival_s"] <= request["sent_s"] <= request["event_times_s"][0] for request in requests)
    assert all(request["prompt_tokens"] == request["asked_prompt_tokens"] for request in requests)
    assert result["totals"]["counted_by"] == {"usage": 6}
    assert result["latencies"][""]["ttft_s"]["count"] == 6
    assert result["server"]["model"] == "stub"
    assert result["host"]["cpu"]
    assert result["client"]["cpu_s"] > 0
    sent = [body for body in server.requests if body["max_tokens"] == 5][1:]  # one warms up
    assert {body["ignore_eos"] for body in sent} == {True}
    assert {type(body["prompt"]) for body in sent} == {list}


@pytest.mark.parametrize(
    "words", [("--concurrency", "1"), ("--rate", "500"), ("--concurrency", "1", "--endpoint", "chat")]
)
def test_the_same_seed_sends_the_same_bodies(tmp_path: Path, words: tuple[str, ...]) -> None:
    sent: list[Any] = []
    for seed in ("7", "7", "8"):
        with stub_server() as server:
            measured(tmp_path, server, *words, "--num-requests", "5", "--seed", seed)
            sent.append(sorted(json.dumps(body) for body in server.requests))
    assert sent[0] == sent[1] != sent[2]


def test_a_fixed_number_of_clients_asks_that_many_at_once_and_no_more(tmp_path: Path) -> None:
    in_flight, most = 0, 0
    lock, together = threading.Lock(), threading.Barrier(3, timeout=20)

    def in_threes(method: str, path: str, body: Any) -> Iterator[bytes]:
        nonlocal in_flight, most
        if body is None or body["max_tokens"] != 4:
            yield from obliging(method, path, body)
            return
        with lock:
            in_flight += 1
            most = max(most, in_flight)
        together.wait()  # passes only when three are here
        with lock:
            in_flight -= 1
        yield from obliging(method, path, body)

    with stub_server(in_threes) as server:
        words = ("--concurrency", "3", "--num-requests", "9", "--output-tokens", "4", "--warmup", "0")
        shown, _ = measured(tmp_path, server, *words)
    assert "9 of 9 answered" in shown
    assert most == 3


def test_requests_of_a_trace_are_due_at_its_times(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": 0.3 * index, "prompt_tokens": 4, "output_tokens": index + 1} for index in range(4)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with stub_server() as server:
        _, result = measured(tmp_path, server, "--trace", str(trace), "--speed", "10")
    assert [request["arrival_s"] for request in result["requests"]] == pytest.approx([0.0, 0.03, 0.06, 0.09])
    assert [request["completion_tokens"] for request in result["requests"]] == [1, 2, 3, 4]


def test_chats_go_on_until_the_last_long_prompt_is_answered_and_stand_apart(tmp_path: Path) -> None:
    with stub_server() as server:
        words = ("--long-prompt", "400", "--num-long", "2", "--long-every", "0.05", "--concurrency", "2")
        shown, result = measured(tmp_path, server, *words, "--output-tokens", "3")
    long = [request for request in result["requests"] if request["group"] == "long"]
    assert [request["prompt_tokens"] for request in long] == [400, 400]
    assert [request["arrival_s"] for request in long] == pytest.approx([0.05, 0.1])
    assert {request["group"] for request in result["requests"]} == {"chat", "long"}
    assert max(request["end_s"] for request in result["requests"] if request["group"] == "chat") >= long[0]["end_s"]
    assert "chat ITL" in shown
    assert "amid a long one" in shown


def test_chats_without_end_give_up_where_every_request_fails(tmp_path: Path) -> None:
    release = threading.Event()

    def long_only(method: str, path: str, body: Any) -> Iterator[bytes]:
        if body is None or body["max_tokens"] != 9:
            release.wait(0 if body is None or body["max_tokens"] != 1 else 0.5)  # the long prompt outlives the chats
            yield from obliging(method, path, body)
        else:
            yield plain(503, {"error": "full"})

    with stub_server(long_only) as server:
        words = ("--long-prompt", "40", "--num-long", "1", "--long-every", "0.01", "--concurrency", "2")
        shown, _ = measured(tmp_path, server, *words, "--output-tokens", "9", "--warmup", "0")
    assert "6 x status 503: full" in shown


def test_a_file_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = bench("http://127.0.0.1:1", "--json", str(tmp_path / "file" / "out.json"))
    assert isinstance(done.exception, ConfigError)
    assert "cannot write" in str(done.exception)


def refusing(*fields: str, status: int = 400, ids: bool = True) -> Answer:
    """A server that does not know these fields, nor prompts as ids if not ``ids``."""

    def answer(method: str, path: str, body: Any) -> Iterator[bytes]:
        for field in fields:
            if body is not None and field in body:
                yield plain(status, {"error": {"message": f"Unrecognized request argument supplied: {field}"}})
                return
        if body is not None and not ids and isinstance(body.get("prompt"), list):
            yield plain(400, {"detail": "prompt must be a string"})
            return
        yield from obliging(method, path, body)

    return answer


def test_fields_that_a_server_refuses_are_left_out_and_said(tmp_path: Path) -> None:
    with stub_server(refusing("ignore_eos", "stream_options", status=422, ids=False)) as server:
        shown, result = measured(tmp_path, server, "--num-requests", "3", "--prompt-tokens", "40")
    assert "3 of 3 answered" in shown
    assert "refuses ignore_eos, which is left out (status 422: Unrecognized request argument" in shown
    assert "refuses stream_options" in shown
    assert "prompts are text: the server refuses token ids" in shown
    assert result["server"]["optional_fields"] == {}
    assert result["server"]["prompt_maker"]["scale"]["overhead"] == 7
    assert {request["prompt_tokens"] for request in result["requests"]} == {40}  # 33 words and the template's 7


def test_newer_servers_are_told_max_completion_tokens(tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any) -> Iterator[bytes]:
        if body is not None and "max_tokens" in body:
            yield plain(400, {"error": {"message": "'max_tokens' is unknown; use 'max_completion_tokens'"}})
        else:
            yield from obliging(method, path, body and body | {"max_tokens": body["max_completion_tokens"]})

    with stub_server(answer) as server:
        shown, _ = measured(tmp_path, server, "--endpoint", "chat", "--num-requests", "2")
    assert "2 of 2 answered" in shown


def test_a_server_that_refuses_schemas_is_reported_by_status_and_message(tmp_path: Path) -> None:
    with stub_server(refusing("response_format", "tools")) as server:
        for flag, name in (("--schema", "response_format"), ("--tools", "tools")):
            words = (flag, "example", "--endpoint", "chat", "--num-requests", "4")
            shown, result = measured(tmp_path, server, *words, exit_code=1)
            assert f"4 x status 400: Unrecognized request argument supplied: {name}" in shown
            assert result["failures"] == [["status", 400, f"Unrecognized request argument supplied: {name}", 4]]


def test_answers_that_ignore_a_schema_are_seen(tmp_path: Path) -> None:
    with stub_server() as server:
        shown, _ = measured(tmp_path, server, "--schema", "example", "--endpoint", "chat", "--num-requests", "2")
        assert "0 of 2 answers are the JSON asked for; 2 were cut by their length" in shown
        sent = server.requests[-1]
    assert sent["response_format"]["json_schema"]["schema"]["required"] == ["name", "age", "tags"]
    assert "ignore_eos" not in sent


def after_probes(answer: Answer, tokens: int = 9) -> Answer:
    """Obliging until the run itself, whose requests ask for ``tokens``."""

    def choose(method: str, path: str, body: Any) -> Iterator[bytes]:
        is_run = body is not None and body["max_tokens"] == tokens
        return answer(method, path, body) if is_run else obliging(method, path, body)

    return choose


def cut(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield STREAM_HEAD
    yield chunk(text_event("a"))
    raise EOFError


def short(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield from stream([text_event("a", "stop"), usage_event(5, 1), DONE])


def empty(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield from stream([text_event("", "stop"), DONE])


def failing(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield from stream([text_event("a"), event({"error": {"message": "boom"}}), DONE])


def whole(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield plain(200, {"choices": [{"text": "a"}]})


def gone(method: str, path: str, body: Any) -> Iterator[bytes]:
    raise EOFError
    yield b""


def busy(method: str, path: str, body: Any) -> Iterator[bytes]:
    yield plain(503, b"<h1>busy</h1>", "text/html")


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (cut, "truncated", "2 x truncated: "),
        (short, "short", "2 x short: 1 tokens of 9 asked"),
        (empty, "empty", "2 x empty: complete, without output"),
        (failing, "error event", "2 x error event: boom"),
        (whole, "protocol", "2 x protocol: the answer is not text/event-stream"),
        (gone, "connection", "2 x connection: "),
        (busy, "status", "2 x status 503: <h1>busy</h1>"),
    ],
)
def test_every_kind_of_failure_is_told_and_measured_by_nothing(
    tmp_path: Path, answer: Answer, kind: str, said: str
) -> None:
    with stub_server(after_probes(answer)) as server:
        words = ("--num-requests", "2", "--output-tokens", "9", "--warmup", "0")
        shown, result = measured(tmp_path, server, *words, exit_code=1)
    assert said in shown
    assert "0 of 2 answered" in shown
    assert {request["failure"] for request in result["requests"]} == {kind}
    assert result["latencies"][""] == dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2e_s"))


def test_short_answers_count_where_they_may_be_short(tmp_path: Path) -> None:
    with stub_server(after_probes(short)) as server:
        shown, _ = measured(tmp_path, server, "--num-requests", "2", "--output-tokens", "9", "--no-ignore-eos")
    assert "2 of 2 answered" in shown
    assert "2 answers are shorter than asked" in shown


def hanging(release: threading.Event) -> Answer:
    def answer(method: str, path: str, body: Any) -> Iterator[bytes]:
        yield STREAM_HEAD
        yield chunk(text_event("a"))
        release.wait(30)
        raise EOFError

    return answer


def test_a_request_that_takes_too_long_has_timed_out(tmp_path: Path) -> None:
    release = threading.Event()
    with stub_server(after_probes(hanging(release))) as server:
        words = ("--num-requests", "1", "--output-tokens", "9", "--warmup", "0", "--timeout", "5")
        shown, result = measured(tmp_path, server, *words, exit_code=1)
        release.set()
    assert "1 x timeout: not complete after 5 s" in shown
    assert len(result["requests"][0]["event_times_s"]) == 1


def test_ctrl_c_prints_and_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, asked = threading.Event(), 0

    def three_then_hang(method: str, path: str, body: Any) -> Iterator[bytes]:
        nonlocal asked
        asked += 1
        return (obliging if asked <= 3 else hanging(release))(method, path, body)

    async def press(self: Runner) -> None:
        while len(self.run.samples) < 3:  # noqa: ASYNC110 - the runner has no event for it
            await asyncio.sleep(0.01)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Runner, "_show_progress", press)
    with stub_server(after_probes(three_then_hang)) as server:
        words = ("--num-requests", "50", "--output-tokens", "9", "--warmup", "0", "--concurrency", "2")
        shown, result = measured(tmp_path, server, *words, exit_code=130)
        release.set()
    assert "3 of 3 answered" in shown
    assert "stopped by Ctrl-C; 2 requests in flight are not counted" in shown
    assert result["was_interrupted"] is True
    assert len(result["requests"]) == 5


def says(status: int, body: Any, kind: str = "application/json") -> Answer:
    return lambda method, path, asked: iter([plain(status, body, kind)])


@pytest.mark.parametrize(
    ("answer", "words", "complaint"),
    [
        (says(401, {"error": {"message": "no key"}}), (), r"answered 401: no key; give its key with --api-key"),
        (says(200, b"<html>hello</html>", "text/html"), (), r"/models lists no model; give --model NAME"),
        (says(200, b"<html>hello</html>", "text/html"), ("--model", "m"), r"is not OpenAI-like: .*; is --url right\?"),
        (
            says(404, b"not here", "text/plain"),
            ("--model", "m"),
            r"answered 404: not here; is --url right, and --model\?",
        ),
        (refusing("model"), ("--model", "other"), r"the server lists the models stub: give one with --model"),
        (refusing("temperature"), (), r"argument supplied: temperature; --extra-body can add or, with null, leave out"),
        (refusing(ids=False), ("--prompts", "ids"), r"refuses token ids as a prompt \(.*\); use --prompts text"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_line_with_the_way_out(
    answer: Answer, words: tuple[str, ...], complaint: str
) -> None:
    with stub_server(answer) as server:
        done = bench(server, *words)
    assert isinstance(done.exception, ServerUnusable)
    assert "\n" not in str(done.exception)
    with pytest.raises(ServerUnusable, match=complaint):
        raise done.exception


def test_a_server_that_is_not_there_is_one_line() -> None:
    with stub_server() as server:
        url = server.url
    done = bench(url)
    assert isinstance(done.exception, ServerUnusable)
    assert str(done.exception) == (
        f"cannot reach {url}/v1: connection refused; is the server running, and is --url right?"
    )


def test_fields_can_be_added_and_left_out(tmp_path: Path) -> None:
    with stub_server(refusing("temperature")) as server:
        measured(tmp_path, server, "--extra-body", '{"temperature": null, "top_k": 5}', "--num-requests", "1")
        assert {(body.get("temperature"), body["top_k"]) for body in server.requests} == {(None, 5)}


@pytest.mark.parametrize("key", ["s3cret", "it's $ecret"])
def test_the_key_is_sent_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "octavo", "bench", "serve", "--api-key", key, "--seed", "0"])
    with stub_server() as server:
        file = tmp_path / "out.json"
        done = bench(server, "--api-key", key, "--num-requests", "1", "--json", str(file))
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {key}"}
    assert done.exit_code == 0
    assert "cret" not in file.read_text() + done.output
    assert "(hidden)" in json.loads(file.read_text())["host"]["command"]


def test_token_ids_are_asked_for_and_counted(tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any) -> Iterator[bytes]:
        if body is None or not body.get("return_token_ids"):
            yield from obliging(method, path, body)
        else:
            yield from stream([text_event("abc", token_ids=[1, 2, 3]), text_event("d", "length", token_ids=[4]), DONE])

    with stub_server(answer) as server:
        shown, result = measured(tmp_path, server, "--token-ids", "--output-tokens", "4", "--num-requests", "2")
    assert "2.00 tokens per event" in shown
    assert result["requests"][0]["event_tokens"] == [3, 1]
    assert result["totals"]["counted_by"] == {"events' own counts": 2}


def test_a_chat_and_a_plot(tmp_path: Path) -> None:
    def answer(method: str, path: str, body: Any) -> Iterator[bytes]:
        if body is None:
            yield from obliging(method, path, body)
            return
        opening, rest = chat_event(role="assistant", content=""), body["max_tokens"] - 1
        texts = [chat_event(content="x")] * rest + [chat_event("length", content="x")]
        yield from stream([opening, *texts, usage_event(9, rest + 1), DONE])

    with stub_server(answer) as server:
        words = (
            "--endpoint",
            "chat",
            "--num-requests",
            "2",
            "--plot",
            str(tmp_path / "p.svg"),
            "--shared-prefix",
            "30",
        )
        shown, _ = measured(tmp_path, server, *words)
        assert [message["role"] for message in server.requests[-1]["messages"]] == ["system", "user"]
    assert "2 of 2 answered" in shown
    assert (tmp_path / "p.svg").read_text().startswith("<svg")


def test_two_results_are_compared_through_a_pipe_in_80_columns(tmp_path: Path) -> None:
    with stub_server() as server:
        for name, number in (("a", "8"), ("b", "9")):
            done = bench(server, "--num-requests", number, "--json", str(tmp_path / f"{name}.json"))
            assert done.exit_code == 0
    done = CliRunner().invoke(app, ["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
    assert done.exit_code == 0
    assert "TTFT P50, ms" in done.stdout
    assert "plan.num_requests: 8 / 9" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    missing = CliRunner().invoke(app, ["bench", "compare", "nowhere.json", "nowhere.json"])
    assert isinstance(missing.exception, ConfigError)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--plot", "x.png"), "--plot draws SVG; name the file x.svg"),
        (("--trace", "t", "--long-prompt", "9"), "goes with neither --trace nor"),
        (("--rate", "2", "--concurrency", "3"), "--rate goes with none of"),
        (("--trace", "t", "--concurrency", "3"), "arrival times of its own"),
        (("--burstiness", "2"), "give --rate"),
        (("--long-prompt", "9", "--num-requests", "3"), "there is --num-long"),
        (("--goodput", "ttft"), "is no latency target"),
        (("--schema", "example", "--tools", "example", "--endpoint", "chat"), "exclude each other"),
        (("--tools", "example"), "go with --endpoint chat"),
        (("--extra-body", "{"), "--extra-body is not JSON"),
        (("--extra-body", "[]"), "--extra-body must be a JSON object"),
        (("--prompt-tokens", "0"), "32:512 for a range"),
        (("--concurrency", "0"), "greater than or equal to 1"),
    ],
)
def test_wrong_flags_are_usage_errors(words: tuple[str, ...], complaint: str) -> None:
    done = bench("http://127.0.0.1:1", *words)
    assert done.exit_code == 2
    assert complaint in done.stderr
