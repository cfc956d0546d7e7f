"""Runs under callgrind: counts the instructions of each path named on the command line, or of all.

    valgrind --tool=callgrind --instr-atstart=no python worker.py REQUESTS.so [PATH ...]

Set-up and warm-up run uninstrumented; after each path callgrind writes one file that bears its group and name.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import native_paths
import python_paths
from hot_path import PATHS, HotPath

from octavo import _native

__all__ = ["main", "native_paths", "python_paths"]

#: Iterations. CPython from 3.11 on specialises bytecode that has run a few times; kernels do not change.
WARM_UP = {"python": 12, "numpy": 12, "native": 2}


def main(requests_library: str, names: list[str]) -> None:
    """Count ``names``, less the kernels where there is no AVX2; KeyError for a name that is unknown."""
    requests = ctypes.CDLL(requests_library)
    has_avx2 = "avx2" in _native.available_isas()
    for path in [PATHS[name] for name in names] if names else PATHS.values():
        if path.rests_on != "native" or has_avx2:
            count(requests, path)


def count(requests: ctypes.CDLL, path: HotPath) -> None:
    """``path.repeats`` iterations between two requests to callgrind."""
    iteration, name = path.prepare(), f"{path.rests_on}: {path.name}".encode()
    for _ in range(WARM_UP[path.rests_on]):
        iteration()
    gc.collect()
    gc.disable()  # when it runs depends on all that ran before
    repeats = range(path.repeats)
    requests.begin()
    for _ in repeats:
        iteration()
    requests.end(name)
    gc.enable()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
