"""The servers of a run: started once, and only one of them awake at a time.

Starting one takes from half a second to two minutes (vLLM compiles its model), so that rounds over all of them would
mostly be starts. A server that is not measured is stopped with SIGSTOP instead: it takes memory and nothing else. Where
memory does not allow that for all, the one used longest ago is ended and started again when its turn comes. Servers
that start in a second are started for each workload, with settings made for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from contenders import HOST, Command, Contender
from workloads import Workload

from octavo.cli.console import remark
from octavo.kernels.machine import probe_machine

READY_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 1200.0, 15.0, 0.05
#: Memory that is to stay free beside all servers.
RESERVE_BYTES = 1 << 30
_TAIL_LINES = 15
_PR_SET_PDEATHSIG = 1


class StartFailed(Exception):
    """A server did not become ready; with the end of its log."""


@dataclass(slots=True, kw_only=True)
class Running:
    """A server process, or a driver that is spoken to through its pipes."""

    contender: Contender
    command: Command
    process: subprocess.Popen[str]
    port: int
    ready_s: float = 0.0
    used: int = 0  # when, in uses of the fleet

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def signal(self, number: int) -> None:
        """To all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """A driver's answer to a line of JSON. StartFailed if it has died."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise StartFailed(f"{self.contender.name} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End all of its processes."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.signal(signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def memory_bytes(self) -> int | None:
        """Resident memory of all of its processes; None where there is no /proc."""
        total = 0
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = status.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
                if int(fields[3]) == self.process.pid:  # its session, which a server leads
                    total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return total or None


@dataclass(slots=True)
class Fleet:
    """``make``: a contender's command for a workload, on a port. Use as a context; every server ends with it."""

    make: Callable[[Contender, Workload, int], Command]
    logs: Path
    free_bytes: Callable[[], int] = lambda: probe_machine().free_bytes
    starts: list[dict[str, Any]] = field(default_factory=list)  # contender, ready_s, memory_bytes
    _alive: dict[Contender, Running] = field(default_factory=dict)
    _uses: int = 0

    def __enter__(self) -> Fleet:
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        for running in self._alive.values():
            running.stop()
        self._alive.clear()

    @contextlib.contextmanager
    def awake(self, contender: Contender, workload: Workload) -> Iterator[Running]:
        """That server, alone on the machine. Raises StartFailed."""
        running = self._alive.get(contender)
        if running is not None and running.process.poll() is not None:  # it died while it slept: of memory, perhaps
            self._end(contender)
            running = None
        if running is None:
            running = self._start(contender, workload)
        else:
            running.signal(signal.SIGCONT)
        self._uses += 1
        running.used = self._uses
        is_well = False
        try:
            yield running
            is_well = running.process.poll() is None
        finally:
            self._note_memory(running)
            if is_well and not running.command.starts_quickly:
                running.signal(signal.SIGSTOP)
            else:
                self._end(contender)

    def _note_memory(self, running: Running) -> None:
        """The most that was seen after a workload."""
        memory = running.memory_bytes()
        start = next(start for start in self.starts if start["contender"] == running.contender.name)
        if memory is not None:
            start["memory_bytes"] = max(memory, start["memory_bytes"] or 0)

    def _start(self, contender: Contender, workload: Workload) -> Running:
        port = _free_port()
        command = self.make(contender, workload, port)
        while self._alive and self.free_bytes() < command.memory_bytes + RESERVE_BYTES:
            self._end(min(self._alive, key=lambda other: self._alive[other].used))
        log = self.logs / f"{contender.name.replace(' ', '-')}.log"
        started = time.perf_counter()
        with log.open("w", encoding="utf-8") as stream:
            running = Running(
                contender=contender, command=command, process=_spawn(contender, command, stream), port=port
            )
        self._alive[contender] = running
        try:
            self._await(running, started)
        except BaseException as error:
            self._end(contender)
            if isinstance(error, StartFailed):
                tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
                raise StartFailed("\n".join([f"{contender.name}: {error}; the end of {log}:", *tail])) from error
            raise
        running.ready_s = time.perf_counter() - started
        facts = {"contender": contender.name, "ready_s": round(running.ready_s, 2), "env": dict(command.env)}
        self.starts.append({**facts, "memory_bytes": running.memory_bytes(), "argv": list(command.argv)})
        remark(f"  {contender.name}: ready after {running.ready_s:.1f} s")
        return running

    def _await(self, running: Running, started: float) -> None:
        if not running.contender.has_http:
            assert running.process.stdout is not None
            if not running.process.stdout.readline():
                raise StartFailed("it ended while it loaded the model")
            return
        while not _is_ready(running.port, running.command.ready_path):
            if running.process.poll() is not None:
                raise StartFailed(f"it ended with status {running.process.returncode} before it was ready")
            if time.perf_counter() - started > READY_TIMEOUT_S:
                raise StartFailed(f"not ready after {READY_TIMEOUT_S:.0f} s")
            time.sleep(POLL_S)

    def _end(self, contender: Contender) -> None:
        self._alive.pop(contender).stop()


def _spawn(contender: Contender, command: Command, log: IO[str]) -> subprocess.Popen[str]:
    pipe = None if contender.has_http else subprocess.PIPE
    return subprocess.Popen(
        command.argv,
        stdin=pipe or subprocess.DEVNULL,
        stdout=pipe or log,
        stderr=log,
        env={**os.environ, **command.env},
        start_new_session=True,  # so that all of its processes get a signal, and Ctrl-C none
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        text=True,
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=10.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):  # not listening yet
        return False
    finally:
        connection.close()
