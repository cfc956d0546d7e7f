"""What a process may use, read from file trees made up for each case."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from octavo.kernels import machine
from octavo.kernels.machine import NO_LIMIT, probe_machine

MIB = 1 << 20


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)


def tree(root: Path, files: dict[str, str]) -> Path:
    """``root`` with these files; those without a place of their own lie in /sys/fs/cgroup."""
    for name, text in {"/proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {1 << 20} kB\n", **files}.items():
        path = root / name.lstrip("/") if name.startswith("/") else root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def v2(group: str = "/", **files: str) -> dict[str, str]:
    """Files of one version 2 group, the process's own."""
    return {"/proc/self/cgroup": f"0::{group}\n"} | {
        f"{group.strip('/')}/{name.replace('_', '.', 1)}".lstrip("/"): text for name, text in files.items()
    }


def test_without_groups_all_that_the_system_has_counts(tmp_path: Path) -> None:
    found = probe_machine(tree(tmp_path, {}))
    assert (found.num_cores, found.free_bytes) == (64, 1 << 30)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 64),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("50000 100000", 1),
        ("1000 1000000", 1),
        ("", 64),
    ],
)
def test_a_quota_of_version_2_is_rounded_up_to_whole_cores(tmp_path: Path, quota: str, cores: int) -> None:
    assert probe_machine(tree(tmp_path, v2(cpu_max=quota))).num_cores == cores


@pytest.mark.parametrize("place", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("300000", 3), ("250000", 3), ("1", 1)])
def test_a_quota_of_version_1_counts_wherever_it_is_mounted(tmp_path: Path, place: str, quota: str, cores: int) -> None:
    files = {
        "/proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n",
        f"{place}/docker/abc/cpu.cfs_quota_us": f"{quota}\n",
        f"{place}/docker/abc/cpu.cfs_period_us": "100000\n",
    }
    assert probe_machine(tree(tmp_path, files)).num_cores == cores


def test_a_limit_of_version_2_leaves_what_is_not_used(tmp_path: Path) -> None:
    files = v2(memory_max=f"{500 * MIB}", memory_current=f"{200 * MIB}")
    assert probe_machine(tree(tmp_path, files)).free_bytes == 300 * MIB


def test_page_cache_that_can_be_dropped_is_free_and_what_must_be_written_first_is_not(tmp_path: Path) -> None:
    stat = f"anon {30 * MIB}\nfile {460 * MIB}\nshmem {20 * MIB}\ninactive_file {300 * MIB}\nactive_file {140 * MIB}\n"
    stat += f"file_dirty {10 * MIB}\nfile_writeback {5 * MIB}\nunevictable {MIB}\n"
    files = v2(memory_max=f"{512 * MIB}", memory_current=f"{492 * MIB}", memory_stat=stat)
    assert probe_machine(tree(tmp_path, files)).free_bytes == (512 - 492 + 300 + 140 - 10 - 5) * MIB


def test_the_same_holds_for_version_1_where_the_totals_of_the_hierarchy_count(tmp_path: Path) -> None:
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {100 * MIB}\ntotal_active_file {50 * MIB}\n"
    files = {
        "/proc/self/cgroup": "4:memory:/docker/abc\n",
        "memory/docker/abc/memory.limit_in_bytes": f"{256 * MIB}",
        "memory/docker/abc/memory.usage_in_bytes": f"{250 * MIB}",
        "memory/docker/abc/memory.stat": stat + f"total_dirty {8 * MIB}\ntotal_writeback {2 * MIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712",  # how version 1 says that there is none
        "memory/memory.usage_in_bytes": f"{900 * MIB}",
    }
    assert probe_machine(tree(tmp_path, files)).free_bytes == (256 - 250 + 150 - 10) * MIB


@pytest.mark.parametrize("tight", ["", "system.slice", "system.slice/octavo.service"])
def test_of_nested_groups_the_tightest_wins_at_whatever_level_it_stands(tmp_path: Path, tight: str) -> None:
    files = {"/proc/self/cgroup": "0::/system.slice/octavo.service\n"}
    for level in ("", "system.slice", "system.slice/octavo.service"):
        files |= {
            f"{level}/memory.max".lstrip("/"): str(100 * MIB if level == tight else 800 * MIB),
            f"{level}/memory.current".lstrip("/"): str(40 * MIB),
            f"{level}/cpu.max".lstrip("/"): "300000 100000" if level == tight else "max 100000",
        }
    found = probe_machine(tree(tmp_path, files))
    assert (found.num_cores, found.free_bytes) == (3, 60 * MIB)


def test_a_group_beside_ours_does_not_count(tmp_path: Path) -> None:
    files = {"/proc/self/cgroup": "0::/a\n", "b/memory.max": "1", "b/memory.current": "1", "b/cpu.max": "1 1"}
    found = probe_machine(tree(tmp_path, files))
    assert (found.num_cores, found.free_bytes) == (64, 1 << 30)


def test_memory_high_is_a_limit_too(tmp_path: Path) -> None:
    files = v2("/a", memory_max="max", memory_high=f"{90 * MIB}", memory_current=f"{20 * MIB}")
    assert probe_machine(tree(tmp_path, files)).free_bytes == 70 * MIB


def test_a_container_that_sees_the_path_of_its_host_finds_its_limit_at_the_root(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/docker/abc\n3:cpu:/docker/abc\n0::/../../elsewhere\n",
        "memory/memory.limit_in_bytes": str(128 * MIB),
        "memory/memory.usage_in_bytes": str(28 * MIB),
        "cpu/cpu.cfs_quota_us": "100000",
        "cpu/cpu.cfs_period_us": "100000",
    }
    found = probe_machine(tree(tmp_path, files))
    assert (found.num_cores, found.free_bytes) == (1, 100 * MIB)


def test_both_versions_at_once_count_both(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "4:memory:/a\n0::/b\n",
        "memory/a/memory.limit_in_bytes": str(300 * MIB),
        "memory/a/memory.usage_in_bytes": "0",
        "unified/b/memory.max": str(200 * MIB),
        "unified/b/memory.current": "0",
    }
    assert probe_machine(tree(tmp_path, files)).free_bytes == 200 * MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert probe_machine(tree(tmp_path, v2(memory_max="100", memory_current="150"))).free_bytes == 0


def test_files_that_make_no_sense_are_no_limit(tmp_path: Path) -> None:
    files = v2(memory_max="lots", memory_high="", memory_current="-3", cpu_max="100000 0", memory_stat="x\ny z\n")
    found = probe_machine(tree(tmp_path, files | {"memory/memory.limit_in_bytes": "7"}))
    assert (found.num_cores, found.free_bytes) == (64, 1 << 30)


def test_where_the_system_tells_nothing_the_limit_of_the_group_still_holds(tmp_path: Path) -> None:
    files = v2(memory_max="1000", memory_current="1") | {"/proc/meminfo": ""}
    assert probe_machine(tree(tmp_path, files)).free_bytes == 999
    assert machine._Cgroups(tmp_path / "nowhere").free_bytes() == NO_LIMIT
