"""Check that no code compiled for one instruction set can end up running on every CPU.

A function with weak linkage (an STL template, an inline function of a header) may be emitted by several files; the
linker keeps one copy for all of them. If that copy was compiled with -mavx512f, every CPU without it dies of SIGILL in
a function that nobody suspects. So an object of an ISA folder may define its kernel table and local symbols only.

    python csrc/check_symbols.py BUILD_DIR
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ISA_FOLDERS = ("avx2", "avx512", "amx", "neon")
#: ``nm`` types of symbols that only their own file can see, or that are not definitions
HARMLESS = frozenset("trbdnUw")


def exported(objects: Path) -> list[tuple[str, str]]:
    """(type, demangled name) of every symbol of an object file that other files could resolve to."""
    lines = subprocess.run(["nm", "-C", objects], check=True, capture_output=True, text=True).stdout.splitlines()
    symbols = [line.split(maxsplit=2) if line[0] != " " else ["", *line.split(maxsplit=1)] for line in lines if line]
    return [(kind, name) for _, kind, name in symbols if kind not in HARMLESS]


def main(build: Path) -> int:
    """0 if every ISA object defines its ``*_kernels()`` functions alone."""
    objects = [path for path in sorted(build.rglob("*.o")) if path.parent.name in ISA_FOLDERS]
    if not objects:
        print(f"no objects of {', '.join(ISA_FOLDERS)} under {build}: build first")
        return 1
    bad = [
        f"{path.parent.name}/{path.name}: {kind} {name}"
        for path in objects
        for kind, name in exported(path)
        if not (kind == "T" and name.startswith("octavo::") and name.endswith("_kernels()"))
    ]
    for line in bad:
        print(line)
    print(f"{len(objects)} objects checked, {len(bad)} symbols that must not be there")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
