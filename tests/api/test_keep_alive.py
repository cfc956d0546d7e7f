"""Clients that parse events, each in its way, against a server whose first token is late."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator

import openai
import pytest
from live_server import LiveServer
from wire import ANSWER, CHAT, HELLO

from octavo.api import sse

BODY = {"messages": HELLO, "stream": True}


@pytest.fixture
def late_server(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> LiveServer:
    """Several keep-alives before each token."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    server.engine.step_s = 0.05
    return server


def test_openai(late_server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{late_server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.chat.completions.create(model="fake", messages=HELLO, stream=True)  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def network_chunks(server: LiveServer) -> Iterator[bytes]:
    """The chunks of an answer one by one, as they come from the network."""
    body = json.dumps(BODY).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock, sock.makefile("rb") as answer:
        sock.sendall(head.encode() + b"\r\n\r\n" + body)
        while answer.readline() != b"\r\n":  # headers
            pass
        while size := int(answer.readline(), 16):
            yield answer.read(size)
            answer.readline()


def test_one_that_strips_every_network_chunk(late_server: LiveServer) -> None:
    """As ``vllm bench serve`` does: what is left of a chunk is an event of its own, or the start of one."""
    text, buffer, num_keep_alives = "", "", 0
    for chunk in network_chunks(late_server):
        stripped = chunk.strip()
        if not stripped:
            num_keep_alives += 1
            continue
        buffer += stripped.decode()
        for message in buffer.split("\n\n"):
            if message.startswith(":"):  # a comment
                continue
            assert message.startswith("data: ")
            if message != "data: [DONE]":
                text += json.loads(message.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        buffer = ""
    assert text == ANSWER
    assert num_keep_alives >= 3


def test_a_keep_alive_comes_between_whole_events_and_as_a_chunk_of_its_own(late_server: LiveServer) -> None:
    chunks = list(network_chunks(late_server))
    assert chunks.count(b"\n\n") >= 3
    for chunk in chunks:
        assert chunk == b"\n\n" or (chunk.startswith(b"data: ") and chunk.endswith(b"\n\n"))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl(late_server: LiveServer) -> None:
    command = ["curl", "--silent", "--no-buffer", "--fail", "-H", "Content-Type: application/json"]
    done = subprocess.run(
        [*command, "-d", json.dumps(BODY), late_server.url + CHAT], capture_output=True, check=True, timeout=30
    )
    lines = [line for line in done.stdout.decode().splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
