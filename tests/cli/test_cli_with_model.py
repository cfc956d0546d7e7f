"""The commands as a user runs them: processes, pipes, signals, a terminal, the default model."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

OCTAVO = (sys.executable, "-c", "from octavo.cli.main import main; main()")
SMALL = ("--max-num-seqs", "4", "--max-model-len", "1024")
TIMEOUT_S = 120


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OCTAVO, *words], capture_output=True, text=True, timeout=TIMEOUT_S, check=False, **options)


@contextmanager
def process(*words: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A running command, killed at the end if it is still there."""
    with subprocess.Popen([*OCTAVO, *words], text=True, **options) as running:
        try:
            yield running
        finally:
            running.kill()


def test_complete_writes_the_continuation_and_nothing_else_to_a_pipe(model_path: Path) -> None:
    prompt = "The capital of France is"
    words = ("complete", "--model", str(model_path), *SMALL, "-n", "12", "--temperature", "0")
    from_argument = run(*words, prompt)
    from_input = run(*words, "-", input=prompt)
    assert (from_argument.returncode, from_argument.stderr) == (0, "")
    assert from_argument.stdout.startswith(" Paris.")
    assert from_input.stdout == from_argument.stdout


def test_complete_ends_at_a_stop_text_and_repeats_with_a_seed(model_path: Path) -> None:
    words = ("complete", "--model", str(model_path), *SMALL, "Once upon a time", "--seed", "7", "-n", "16")
    first, again = run(*words), run(*words)
    assert first.stdout == again.stdout != ""
    stop = first.stdout.strip().split()[2]
    assert run(*words, "--stop", stop).stdout == first.stdout[: first.stdout.index(stop)]


def test_a_reader_that_leaves_ends_complete_quietly(model_path: Path) -> None:
    words = ("complete", "--model", str(model_path), *SMALL, "Once upon a time", "--temperature", "0")
    with process(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1) != ""
        running.stdout.close()
        assert running.wait(TIMEOUT_S) != 0
        assert running.stderr.read() == ""


def test_ctrl_c_ends_complete_quietly_with_exit_code_130(model_path: Path) -> None:
    words = ("complete", "--model", str(model_path), *SMALL, "Once upon a time", "--temperature", "0")
    with process(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stdout.read(1) != ""
        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_S) == 130
        assert running.stderr.read() == ""


def test_doctor_passes_on_the_default_model_and_fails_on_a_damaged_one(model_path: Path, tmp_path: Path) -> None:
    good = run("doctor", str(model_path), *SMALL)
    assert good.returncode == 0, good.stdout
    assert re.search(r"^PASS  golden tokens: \d\d+ tokens of \d prompts", good.stdout, re.MULTILINE)
    assert "FAIL" not in good.stdout

    damaged = tmp_path / "damaged.gguf"
    content = bytearray(model_path.read_bytes())
    content[-4096:] = bytes(4096)
    damaged.write_bytes(content[: len(content) // 2])
    bad = run("doctor", str(damaged))
    assert bad.returncode == 1
    assert "FAIL" in bad.stdout


def test_doctor_compares_no_golden_tokens_when_the_model_is_not_there(tmp_path: Path) -> None:
    done = run("doctor", env={**os.environ, "OCTAVO_CACHE": str(tmp_path)})
    assert done.returncode == 1
    assert "octavo pull smollm2-135m" in " ".join(done.stdout.split())
    assert "golden" not in done.stdout


class Terminal:
    """A command on a pseudo-terminal."""

    def __init__(self, *words: str) -> None:
        self._master, slave = pty.openpty()
        # A session of its own with the terminal as its controlling one: Ctrl-C then reaches the command.
        code = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); from octavo.cli.main import main; main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.screen = ""

    def shows(self, pattern: str, seconds: float = 2.0) -> bool:
        """Whether the pattern appears within that time; what has appeared stays to be read."""
        deadline = time.monotonic() + seconds
        while re.search(pattern, self.screen) is None and time.monotonic() < deadline:
            if select.select([self._master], [], [], 0.1)[0]:
                self.screen += os.read(self._master, 4096).decode(errors="replace")
        return re.search(pattern, self.screen) is not None

    def read_until(self, pattern: str) -> str:
        """What has appeared since the last call, up to the pattern."""
        deadline = time.monotonic() + TIMEOUT_S
        while (match := re.search(pattern, self.screen)) is None:
            assert time.monotonic() < deadline, self.screen
            if select.select([self._master], [], [], 1)[0]:
                try:
                    self.screen += os.read(self._master, 4096).decode(errors="replace")
                except OSError as error:  # the other side has ended
                    raise AssertionError(self.screen) from error
        before, self.screen = self.screen[: match.end()], self.screen[match.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


def test_chat_on_a_terminal_streams_remembers_stops_and_leaves(model_path: Path) -> None:
    with Terminal("chat", str(model_path), *SMALL, "--temperature", "0", "-n", "400") as terminal:
        terminal.read_until("> ")
        terminal.type("What is the capital of France?\n")
        assert re.search(r"France\?\r\n\w+", terminal.read_until(r"\r\n> "))
        terminal.type("/stats\n")
        first = terminal.read_until(r"\r\n> ")
        assert "(0 cached)" in first
        terminal.type("Write a very long story.\n")
        terminal.read_until(r"story\.\r\n(\S+\s+){3}")
        terminal.type("\x03")
        assert "(stopped)" in terminal.read_until(r"\r\n> ")
        terminal.type("/stats\n")
        second = terminal.read_until(r"\r\n> ")
        cached = re.search(r"prompt (\d+) tokens \((\d+) cached\).*\(abort\), first token after \d+ ms", second)
        assert cached is not None, second
        assert 0 < int(cached[2]) < int(cached[1])
        # At the prompt nothing is lost. A key that comes before readline listens is seen with the next one.
        while not terminal.shows(r"Ctrl-D leaves\)\r\n> "):
            terminal.type("\x03")
        terminal.read_until(r"Ctrl-D leaves\)\r\n> ")
        terminal.shows("never", seconds=0.5)  # until all is quiet
        terminal.type("\x04")
        assert terminal.process.wait(TIMEOUT_S) == 0


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_serve_answers_503_then_shows_its_table_refuses_a_second_server_and_stops_on_ctrl_c(model_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ("serve", str(model_path), *SMALL, "--port", str(port), "--served-model-name", "mine")
    with process(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert running.stderr.readline().startswith("octavo ")  # loading; the port is bound
        early = get_when_listening(f"{url}/health")
        assert early[0] in (503, 200)  # 200 only on a machine that loads within a moment
        shown = ""
        while "Try it:" not in shown:
            line = running.stdout.readline()
            assert line, running.stderr.read()
            shown += line
        assert f"{url}/v1" in shown
        assert get(f"{url}/health")[0] == 200
        assert [model["id"] for model in get(f"{url}/v1/models")[1]["data"]] == ["mine"]

        second = run("serve", str(model_path), "--port", str(port))
        assert second.returncode == 1
        assert second.stderr.startswith(f"octavo: port {port} on 127.0.0.1 is in use")
        assert second.stderr.count("\n") == 1

        running.send_signal(signal.SIGINT)
        assert running.wait(TIMEOUT_S) == 0
        assert "Traceback" not in running.stderr.read()


def get_when_listening(url: str) -> tuple[int, Any]:
    """The first answer: the socket is bound before the server accepts, so the connection waits."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            return get(url)
        except urllib.error.URLError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
