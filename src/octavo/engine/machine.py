"""What this process may use of the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits of this process: affinity and container limits counted."""

    num_cores: int
    free_bytes: int  # memory that is free now


def probe_machine() -> Machine:
    """Ask the OS. Where it does not tell free memory, 2 GiB is assumed and the user can say otherwise."""
    return Machine(num_cores=_num_cores(), free_bytes=min(_os_free_bytes(), _cgroup_free_bytes()))


def _num_cores() -> int:
    try:
        cores = len(os.sched_getaffinity(0))  # not on macOS
    except AttributeError:
        cores = os.cpu_count() or 1
    return max(1, min(cores, _cgroup_cores()))


def _cgroup_cores() -> int:
    """Cores granted by the container's CPU quota (cgroup v2), rounded up; a large number if there is no quota."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 1 << 20
    return 1 << 20 if quota == "max" else max(1, -(-int(quota) // int(period)))


def _os_free_bytes() -> int:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 2 * _GIB


def _cgroup_free_bytes() -> int:
    """What the container's memory limit leaves (cgroup v2, then v1); a large number if there is no limit."""
    pairs = (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    )
    for limit_path, usage_path in pairs:
        try:
            limit = Path(limit_path).read_text().strip()
            usage = int(Path(usage_path).read_text())
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < 1 << 60:
            return max(0, int(limit) - usage)
    return 1 << 62
