"""What this process may use of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GIB = 1 << 30
NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits of this process: affinity and container limits counted."""

    num_cores: int
    free_bytes: int  # memory that is free now, or can be reclaimed at once


def probe_machine(root: Path = Path("/")) -> Machine:
    """Ask the OS. Where it does not tell free memory, 2 GiB is assumed and the user can say otherwise.

    root: where /proc and /sys are; tests build their own.
    """
    try:
        cores = len(os.sched_getaffinity(0))  # not on macOS
    except AttributeError:
        cores = os.cpu_count() or 1
    cgroups = _Cgroups(root)
    return Machine(
        num_cores=max(1, min(cores, cgroups.num_cores())), free_bytes=min(_os_free_bytes(root), cgroups.free_bytes())
    )


class _Cgroups:
    """The control groups around this process, version 2, version 1, or both at once.

    A limit may stand at any level (a container, its pod, a systemd slice), so each hierarchy is walked from the group
    of ``/proc/self/cgroup`` up to its root, and the smallest wins. Inside a container that path may be the host's and
    lead nowhere; levels that are not there are passed over, and the root, which is the container's own, is looked at
    in any case.
    """

    def __init__(self, root: Path) -> None:
        base = root / "sys/fs/cgroup"
        paths = _own_paths(root / "proc/self/cgroup")
        self._unified = [*_levels(base, paths.get("", "")), *_levels(base / "unified", paths.get("", ""))]
        self._memory = list(_levels(base / "memory", paths.get("memory", "")))
        names = ("cpu", "cpu,cpuacct", "cpuacct,cpu")  # whichever of them is no link
        self._cpu = [level for name in names for level in _levels(base / name, paths.get("cpu", ""))]

    def num_cores(self) -> int:
        """Cores granted by CPU quotas, rounded up."""
        quotas = [_read(level / "cpu.max").split() for level in self._unified]
        quotas += [[_read(level / f"cpu.cfs_{part}_us") for part in ("quota", "period")] for level in self._cpu]
        granted = [
            -(-int(quota[0]) // int(quota[1]))
            for quota in quotas
            if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1])  # not "max", not -1
        ]
        return max(1, min(granted, default=NO_LIMIT))

    def free_bytes(self) -> int:
        """What the memory limits leave. ``memory.high`` counts too: beyond it a process is slowed down to nothing."""
        free = [NO_LIMIT]
        for level in self._unified:
            limits = (_read(level / "memory.max"), _read(level / "memory.high"))
            free += [_left(level, limit, "memory.current", "") for limit in limits if limit.isdecimal()]
        for level in self._memory:
            limit = _read(level / "memory.limit_in_bytes")
            free += [_left(level, limit, "memory.usage_in_bytes", "total_")] if limit.isdecimal() else []
        return min(free)


def _left(level: Path, limit: str, usage_file: str, prefix: str) -> int:
    """A group's limit less its usage, where page cache that could be dropped at once is no usage.

    That is the two file lists of ``memory.stat``, without what must be written out first. They hold neither tmpfs nor
    locked pages.
    """
    usage = _read(level / usage_file)
    if not usage.isdecimal():
        return NO_LIMIT
    stat = dict(line.split(maxsplit=1) for line in _read(level / "memory.stat").splitlines() if " " in line)

    def counted(*names: str) -> int:
        return sum(int(stat[name]) for name in names if stat.get(name, "").isdecimal())

    cached = counted(f"{prefix}inactive_file", f"{prefix}active_file")
    unwritten = counted(*(("total_dirty", "total_writeback") if prefix else ("file_dirty", "file_writeback")))
    used = int(usage) - max(0, cached - unwritten)
    return max(0, int(limit) - max(0, used))


def _own_paths(file: Path) -> dict[str, str]:
    """Controller -> this process's path in its hierarchy; "" stands for version 2."""
    paths: dict[str, str] = {}
    for line in _read(file).splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number:
            paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _levels(base: Path, path: str) -> Iterator[Path]:
    """Directories from ``base / path`` up to ``base``."""
    parts = [part for part in path.split("/") if part]
    if ".." in parts:  # outside of what this process can see
        parts = []
    for length in range(len(parts), -1, -1):
        yield base.joinpath(*parts[:length])


def _read(file: Path) -> str:
    """The text of a small file; "" if it is not there."""
    try:
        return file.read_text().strip()
    except (OSError, ValueError):
        return ""


def _os_free_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # not Linux
    except (ValueError, OSError, AttributeError):
        return 2 * _GIB
