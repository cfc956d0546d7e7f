"""A server under attack, seen from outside. ``OCTAVO_ATTACK=long`` (``make test-attack``) attacks in full size."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
IS_LONG = os.environ.get("OCTAVO_ATTACK") == "long"


class Attacked:
    """A server process, seen from outside."""

    def __init__(self, model: str, log: Path) -> None:
        self._log = log
        command = [sys.executable, str(HERE / "attacked_server.py"), model, "1000" if IS_LONG else "100"]
        with log.open("w") as err:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)
        assert self.process.stdout is not None
        address = self.process.stdout.readline()
        assert address, log.read_text()
        self.port = int(address.rsplit(":", 1)[1])
        self.has_model = model != "stub"

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory_bytes(self) -> int:
        """Resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) << 10

    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def log_tail(self) -> str:
        return self._log.read_text()[-4000:]


@contextmanager
def attacked(model: str, log: Path) -> Iterator[Attacked]:
    server = Attacked(model, log)
    try:
        yield server
        assert server.process.poll() is None, server.log_tail()
    finally:
        server.process.terminate()
        server.process.communicate(timeout=30)
