"""The guard: hot paths may not grow by 5 % in instructions against the figures that are checked in.

    python benchmarks/guard/instruction_counts.py            check
    python benchmarks/guard/instruction_counts.py --update   rewrite the figures of this interpreter and compiler

Instructions are counted by valgrind (callgrind), so that neither the machine's speed nor its load matters. What does
matter stands beside each figure as its key: the interpreter, numpy, the C++ compiler. Where no figures are stored for
a key, nothing is compared, and that is said. docs/guard.md says how to read a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
FIGURES = HERE / "instructions.json"
MAX_GROWTH = 0.05
VALGRIND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--quiet")
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)
_NAME = re.compile(r"^desc: Trigger: Client Request: (.+)$", re.MULTILINE)
_COMPILER = re.compile(rb"(GCC: \([^)]*\) [0-9.]+|[A-Za-z ]*clang version [0-9.]+)")

Figures = dict[str, dict[str, int]]  # group or key -> path -> instructions


class GuardError(Exception):
    """The guard cannot run; says why and what to do."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one path. ``stored`` None: there are no figures for its key, or it is new under it."""

    path: str
    key: str
    stored: int | None
    now: int | None
    problem: str = ""

    @property
    def growth(self) -> float | None:
        return None if not self.stored or self.now is None else self.now / self.stored - 1


def build_keys() -> dict[str, str]:
    """``hot_path.RestsOn`` -> what identifies the builds that its counts depend on."""
    arguments = str(sysconfig.get_config_var("CONFIG_ARGS") or "")
    tuned = [name for name in ("--enable-optimizations", "--with-lto") if name in arguments]
    python = " ".join((platform.python_implementation(), platform.python_version(), platform.python_compiler(), *tuned))
    spec = find_spec("octavo._native")
    if spec is None or spec.origin is None:
        raise GuardError("octavo._native is not built; run make install")
    compiler = _COMPILER.search(Path(spec.origin).read_bytes())
    name = compiler[1].decode() if compiler else "an unknown compiler"
    return {
        "python": f"python: {python}",
        "numpy": f"numpy: {version('numpy')}, {python}",
        "native": f"native: {name}, {' '.join(platform.libc_ver())}, {platform.machine()}",
    }


def measure(paths: Sequence[str] = (), *, script: Path = HERE / "worker.py") -> Figures:
    """Instructions by ``hot_path.RestsOn`` and path, each as often as the path repeats, in one process."""
    if shutil.which(VALGRIND[0]) is None:
        raise GuardError("valgrind is not installed; on Debian and Ubuntu: apt-get install valgrind")
    with tempfile.TemporaryDirectory(prefix="octavo-guard-") as folder:
        library = Path(folder) / "requests.so"
        _compile(HERE / "callgrind_requests.c", library)
        command = [*VALGRIND, f"--callgrind-out-file={folder}/out", sys.executable, str(script), str(library), *paths]
        done = subprocess.run(command, env=_environment(), cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise GuardError(f"the worker ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        return _read_counts(Path(folder))


def _compile(source: Path, library: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        raise GuardError("there is no C compiler; install gcc")
    done = subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise GuardError(f"{source.name} does not compile; are valgrind's headers installed?\n{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    """Nothing but this: its size moves the stack, and libraries read all kinds of variables."""
    return {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": f"{HERE}:{HERE.parent}",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONMALLOC": "pymalloc",
        "OCTAVO_ISA": "avx2",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _read_counts(folder: Path) -> Figures:
    """From the dumps ``out.1``, ``out.2``, ..., each named ``group: path``."""
    counts: Figures = {}
    for dump in sorted(folder.glob("out.*"), key=lambda file: int(file.suffix[1:])):
        text = dump.read_text(encoding="utf-8", errors="replace")
        name, total = _NAME.search(text), _TOTAL.search(text)
        if name is not None and total is not None:
            group, _, path = name[1].partition(": ")
            counts.setdefault(group, {})[path] = int(total[1])
    return counts


def compare(stored: Figures, now: Figures) -> list[Verdict]:
    """One verdict per path; those with a ``problem`` fail the guard."""
    verdicts = []
    for key, counts in now.items():
        known = stored.get(key)
        for path, count in counts.items():
            before = None if known is None else known.get(path)
            problem = ""
            if known is not None and before is None:
                problem = "has no figure"
            elif before is not None and count >= before * (1 + MAX_GROWTH):
                problem = f"grew by {count / before - 1:.1%}"
            verdicts.append(Verdict(path, key, before, count, problem))
        gone = [] if known is None else [path for path in known if path not in counts]
        verdicts += [Verdict(path, key, stored[key][path], None, "is not measured any more") for path in gone]
    return verdicts


def report(verdicts: Sequence[Verdict]) -> str:
    """A table, what was not compared, and for a failure what to do."""
    lines = [f"{'instructions of':<64}{'stored':>13}{'now':>13}{'change':>9}"]
    for v in verdicts:
        stored, now = ("-" if n is None else f"{n:,}" for n in (v.stored, v.now))
        change = "" if v.growth is None else f"{v.growth:+.1%}"
        lines.append(f"{v.path:<64}{stored:>13}{now:>13}{change:>9}{'  <-- ' + v.problem if v.problem else ''}")
    failed = [v for v in verdicts if v.problem]
    unknown = sorted({v.key for v in verdicts if v.stored is None and not v.problem})
    lines += [f"not compared: no figures for {key}; make guard-update adds them" for key in unknown]
    if any(v.growth is not None and v.growth <= -MAX_GROWTH for v in verdicts):
        lines.append("some paths fell by 5 % or more: make guard-update, or they may grow back unseen")
    if failed:
        lines.append(
            f"{len(failed)} of {len(verdicts)} paths fail. If that is the price of something, run make guard-update "
            "and say in the commit what was bought; else docs/guard.md says how to find the cause."
        )
    elif not unknown:
        lines.append(f"{len(verdicts)} paths, none grew by {MAX_GROWTH:.0%}")
    return "\n".join(lines)


def read_figures(file: Path = FIGURES) -> Figures:
    found: Figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def write_figures(figures: Figures, file: Path = FIGURES) -> None:
    """Replace the figures of these keys; those of other interpreters and compilers stay."""
    merged = dict(sorted((read_figures(file) | figures).items()))
    file.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the figures instead of comparing with them")
    args = parser.parse_args()
    try:
        keys = build_keys()
        counts = measure()
    except GuardError as error:
        print(f"guard: {error}", file=sys.stderr)
        return 2
    now = {keys[group]: of_group for group, of_group in counts.items()}
    if "native" not in counts:
        print("not counted: the kernels; this CPU has no AVX2")
    if args.update:
        write_figures(now)
        print(f"wrote {sum(map(len, now.values()))} figures to {FIGURES}")
        return 0
    verdicts = compare(read_figures(), now)
    print(report(verdicts))
    return 1 if any(v.problem for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
