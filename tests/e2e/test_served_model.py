"""A real server process with the real model, as clients see it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

pytestmark = pytest.mark.slow
MODEL_NAME = "the-model"
#: A hundred-odd tokens that several requests share.
LONG_PROMPT = "The quick brown fox jumps over the lazy dog. " * 12


class Server:
    """``octavo serve`` in a process of its own."""

    def __init__(self, model: Path, *flags: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, timeout=120)
        command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", str(port)]
        command += ["--served-model-name", MODEL_NAME, "--max-model-len", "2048", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def wait_until_ready(self) -> set[int]:
        """The statuses that /health gave on the way."""
        seen = set()
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.process.communicate()[0]
            with suppress(httpx.TransportError):
                seen.add(self.http.get("/health").status_code)
            if 200 in seen:
                return seen
            time.sleep(0.05)
        raise AssertionError("the server was not ready within two minutes")

    def client(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)

    def stop(self) -> int:
        """SIGTERM -> exit code."""
        self.http.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


@contextmanager
def running(model: Path, *flags: str) -> Iterator[Server]:
    server = Server(model, *flags)
    try:
        server.wait_until_ready()
        yield server
    finally:
        assert server.stop() == 0


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Server]:
    with running(model_path) as started:
        yield started


def streamed(client: OpenAI, question: str, **fields: Any) -> str:
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=[{"role": "user", "content": question}], stream=True, temperature=0.0,
        max_tokens=32, **fields,
    )  # fmt: skip
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_eight_streams_at_once_say_what_each_says_alone(server: Server) -> None:
    client = server.client()
    questions = [f"Tell me about the number {number}." for number in range(8)]
    alone = [streamed(client, question) for question in questions]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda question: streamed(client, question), questions))
    assert all(alone)
    if server.http.get("/v1/stats").json()["requests"]["ended"]["error"]:
        pytest.fail("a request failed")
    assert together == alone


def test_usage_says_how_much_of_the_prompt_was_cached(server: Server) -> None:
    client = server.client()
    prompts = [LONG_PROMPT + ending for ending in ("So", "But then")]
    first, second = (client.completions.create(model=MODEL_NAME, prompt=p, max_tokens=1).usage for p in prompts)
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    block = 16  # what the first request filled only in part was not cached
    assert second.prompt_tokens - block <= second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_a_client_that_leaves_is_aborted_and_its_blocks_come_back(server: Server) -> None:
    before = server.http.get("/v1/stats").json()["requests"]["ended"]["abort"]
    body = {"model": MODEL_NAME, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        next(response.iter_lines())
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        stats = server.http.get("/v1/stats").json()
        if stats["requests"]["ended"]["abort"] == before + 1:
            break
    assert stats["requests"]["ended"]["abort"] == before + 1
    assert stats["requests"]["running"] == 0
    assert stats["kv_cache"]["used_blocks"] == 0


def test_the_lifecycle_route_tells_a_request_from_submission_to_end(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    life = server.http.post("/debug/lifecycle", json=body).json()
    assert set(life) == {"request_id", "text", "events", "summary"}
    names = [event["event"] for event in life["events"]]
    assert names == ["SUBMITTED", "QUEUED", "ADMITTED", "PREFILL_CHUNK", *["DECODE_STEP"] * 4, "FINISHED"]
    times = [event["t_s"] for event in life["events"]]
    assert times == sorted(times)
    assert life["summary"]["output_tokens"] == 5
    assert life["text"]
    again = server.http.get(f"/debug/lifecycle/{life['request_id']}").json()
    assert again["events"] == life["events"]
    assert server.http.get("/debug/lifecycle/nobody").status_code == 404


def test_the_batch_route_tells_what_each_step_ran(server: Server) -> None:
    body = {"prompts": ["One two three", "Four five", "Six"], "max_tokens": 4, "ignore_eos": True}
    found = server.http.post("/debug/batch", json=body).json()
    assert [output["finish_reason"] for output in found["outputs"]] == ["length"] * 3
    run: dict[str, list[tuple[int, int]]] = {}
    for step in found["steps"]:
        assert {"step_id", "t_s", "chunks", "budget", "preempted", "step_ms"} <= set(step)
        for chunk in step["chunks"]:
            run.setdefault(chunk["request_id"], []).append((chunk["start"], chunk["len"]))
            assert chunk["reason"]
    assert len(run) == 3
    for chunks in run.values():
        position = chunks[0][0]
        for start, length in chunks:
            assert start == position, "every position is run once, in order"
            position += length


def test_stats_and_prefix_cache_are_consistent(server: Server) -> None:
    stats = server.http.get("/v1/stats", params={"window": "1h"}).json()
    for name in ("ttft_s", "tpot_s", "itl_s"):
        assert stats[name]["count"] > 0
        assert 0 < stats[name]["p50"] <= stats[name]["p99"]
    cache = server.http.get("/debug/prefix_cache").json()
    assert cache["hits"] + cache["misses"] == cache["lookups"] > 0
    assert 0 < cache["hit_rate"] < 1
    assert cache["nodes"] >= cache["depth"] > 0
    assert server.http.get("/v1/stats", params={"window": "2d"}).status_code == 400


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/debug/lifecycle", {"max_tokens": 1}, "prompt"),
        ("/debug/lifecycle", {"prompt": "a", "n": 2}, "n"),
        ("/debug/lifecycle", {"prompt": ["a", "b"]}, "prompt"),
        ("/debug/lifecycle", {"prompt": "a", "stream": True}, "stream"),
        ("/debug/batch", {"prompt": "a"}, "prompts"),
        ("/debug/batch", {"prompts": []}, "prompts"),
        ("/debug/batch", {"prompts": ["a"], "max_tokenz": 1}, "max_tokenz"),
    ],
)
def test_debug_routes_refuse_by_name(server: Server, route: str, body: dict[str, Any], param: str) -> None:
    response = server.http.post(route, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_keys_separate_clients_and_only_an_admin_sees_all(model_path: Path) -> None:
    with running(model_path, "--api-key", "alice", "--api-key", "bob", "--admin-key", "root") as server:

        def call(key: str | None, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            return server.http.request(method, path, json=body, headers=headers)

        prompt = {"prompt": LONG_PROMPT, "max_tokens": 2, "ignore_eos": True}
        assert call(None, "POST", "/v1/completions", prompt).status_code == 401
        cached = [
            call(key, "POST", "/v1/completions", prompt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key in ("alice", "bob", "alice")
        ]
        assert cached[:2] == [0, 0], "bob cannot learn what alice asked"
        assert cached[2] > 100
        life = call("alice", "POST", "/debug/lifecycle", prompt).json()
        assert "nearest" not in json.dumps(life)
        path = f"/debug/lifecycle/{life['request_id']}"
        assert [call(key, "GET", path).status_code for key in ("alice", "bob", "root", None)] == [200, 404, 200, 401]


def test_a_full_queue_is_a_429_that_says_when_to_come_back(model_path: Path) -> None:
    with running(model_path, "--max-num-seqs", "1", "--max-queue", "1") as server:
        body = {"prompt": "Once", "max_tokens": 400, "ignore_eos": True}

        def complete(_: int) -> httpx.Response:
            return server.http.post("/v1/completions", json=body)

        with ThreadPoolExecutor(6) as pool:
            responses = list(pool.map(complete, range(6)))
        statuses = sorted(response.status_code for response in responses)
        assert statuses.count(200) >= 2
        assert set(statuses) == {200, 429}
        assert all(int(r.headers["retry-after"]) >= 1 for r in responses if r.status_code == 429)


def test_a_port_in_use_says_so_in_a_line(server: Server, model_path: Path) -> None:
    port = server.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "octavo", "serve", str(model_path), "--port", port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"})
    assert done.returncode == 1
    assert f"port {port}" in done.stderr
    assert "Traceback" not in done.stderr
