"""What this machine is: facts for ``octavo doctor`` and for benchmark results."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from octavo.kernels.machine import probe_machine

#: The instruction sets that kernels of language models care about, as Linux and macOS spell them.
ISA_FLAGS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
_MAC_FEATURES = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "AdvSIMD": "asimd"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Facts of the machine and of the process's share in it, at one moment."""

    cpu: str
    isa: tuple[str, ...]  # members of ISA_FLAGS
    cores: int  # that this process may use
    machine_cores: int
    free_bytes: int  # memory that is free now, container limits counted
    total_bytes: int  # of the machine; 0 if the system does not tell
    load_1min: float | None  # runnable processes, averaged over the last minute
    system: str
    python: str


def probe_host() -> Host:
    """Ask the system. Takes a few milliseconds."""
    machine = probe_machine()
    cpu, flags = _linux_cpu() if sys.platform == "linux" else _mac_cpu() if sys.platform == "darwin" else ("", set())
    return Host(
        cpu=cpu or platform.processor() or platform.machine(),
        isa=tuple(flag for flag in ISA_FLAGS if flag in flags),
        cores=machine.num_cores,
        machine_cores=os.cpu_count() or 1,
        free_bytes=machine.free_bytes,
        total_bytes=_total_bytes(),
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
    )


def package_version(name: str) -> str | None:
    """Version of an installed package, without importing it; None if it is not there."""
    if importlib.util.find_spec(name) is None:
        return None
    return importlib.metadata.version(name)


def _linux_cpu() -> tuple[str, set[str]]:
    """Model name and flags of the first core; x86 and ARM kernels name the lines differently."""
    name, flags = "", set[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return name, flags
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() == "model name":
            name = value.strip()
        elif key.strip().lower() in ("flags", "features"):
            flags = set(value.split())
    return name, flags


def _mac_cpu() -> tuple[str, set[str]]:
    flags = {flag for feature, flag in _MAC_FEATURES.items() if _sysctl(f"hw.optional.arm.{feature}") == "1"}
    intel = {"AVX1.0": "avx", "AVX2": "avx2", "FMA": "fma", "F16C": "f16c", "SSE4.2": "sse4_2", "AVX512F": "avx512f"}
    words = f"{_sysctl('machdep.cpu.features')} {_sysctl('machdep.cpu.leaf7_features')}".split()
    return _sysctl("machdep.cpu.brand_string"), flags | {intel[word] for word in words if word in intel}


def _sysctl(name: str) -> str:
    """A value of the macOS kernel; "" if it has none of that name."""
    done = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _total_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
