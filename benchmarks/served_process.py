"""A server of its own process, as a user starts it: when it answers, and what memory it takes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOST, TIMEOUT_S, POLL_S = "127.0.0.1", 1800.0, 0.03
#: What `octavo serve` imports before it is ready.
SERVER_MODULES = ("octavo.cli.main", "octavo.api.server", "octavo.engine.async_engine", "octavo.kernels.native.backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server that has said 200 to /health."""

    pid: int
    port: int
    ready_s: float  # from starting the process
    cpu_s: float | None  # processor time that it had taken by then, all threads; None where /proc does not say

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON answer. SystemExit for any status but 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise SystemExit(f"{method} {path}: the server answered {answer.status}: {text}")
        result: dict[str, Any] = json.loads(text)
        return result


def installed_environment(cache: Path) -> dict[str, str]:
    """This environment, with byte code kept in ``cache`` whatever it says about that, as an installation keeps it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(cache)}


@contextlib.contextmanager
def served(arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Served]:
    """``octavo serve`` with these arguments, ready; stopped when the context ends. SystemExit if it does not start."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo", "serve", *arguments, "--host", HOST, "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(environment))
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.perf_counter() - started > TIMEOUT_S:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} did not become ready:\n{log.read()}")
                time.sleep(POLL_S)
            ready_s = time.perf_counter() - started
            yield Served(pid=process.pid, port=port, ready_s=ready_s, cpu_s=_cpu_s(process.pid))
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()
                process.wait()


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:  # not listening yet
        return False
    finally:
        connection.close()


def _cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:  # no Linux
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime and stime, after the name


def import_seconds(environment: Mapping[str, str]) -> dict[str, float]:
    """Top-level package -> seconds of its own code while a server's modules are imported, most first."""
    code = f"import {', '.join(SERVER_MODULES)}"
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True)
    return by_package(done.stderr)


def by_package(report: str) -> dict[str, float]:
    """The "self" column of ``-X importtime``, in microseconds, summed by package; the standard library is "python"."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for own, module in re.findall(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)$", report, re.MULTILINE):
        package = module.partition(".")[0]
        name = "python" if package in sys.stdlib_module_names else package
        seconds[name] += int(own) * 1e-6
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def memory_bytes(pid: int) -> dict[str, int] | None:
    """Resident memory by Linux's names: VmRSS, VmHWM, RssAnon, ..., Pss, ...; None where there is no /proc."""
    found: dict[str, int] = {}
    for name in ("status", "smaps_rollup"):
        try:
            text = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        found |= {key: int(kib) << 10 for key, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    return {key: found[key] for key in sorted(found) if key.startswith(("Vm", "Rss", "Pss", "Private", "AnonHuge"))}
