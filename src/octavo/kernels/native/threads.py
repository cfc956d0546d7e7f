"""How many threads compute: one per physical core that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CPU = Path("/sys/devices/system/cpu")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Physical cores inside the affinity mask, at most the container's CPU quota, at least 1."""
    return max(1, min(_physical_cores(_allowed_cpus()), _quota()))


def _allowed_cpus() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on macOS
        return set(range(os.cpu_count() or 1))


def _physical_cores(cpus: set[int]) -> int:
    """Siblings of one core share its vector units: a second thread on it only adds contention."""
    cores = set()
    for cpu in cpus:
        try:
            siblings = (_CPU / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            siblings = str(cpu)
        cores.add(siblings)
    return len(cores)


def _quota() -> int:
    """Cores granted by the cgroup v2 quota, rounded up; a large number if there is none."""
    try:
        quota, period = _QUOTA.read_text().split()
        return 1 << 20 if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return 1 << 20
