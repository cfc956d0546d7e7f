"""Mutation testing: change the code in one place, run its fast tests, list the changes that no test notices.

    python scripts/mutants.py                                   every file below (hours)
    python scripts/mutants.py src/octavo/scheduler/policy.py    one file or folder
    python scripts/mutants.py --sample 40 src/octavo/memory     40 of its mutants, always the same ones

Each mutant lives in memory: an import hook hands the changed module to a forked process that runs pytest. An editable
install of a package with native code maps every module to its source file before sys.path is asked, so tools that test
a changed copy of the tree (mutmut) would test the unchanged one.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.util
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
SCHEDULER = (
    "policy", "scheduler", "chunk_sizer", "restart", "failed_draws", "drafts", "overload", "schedule_invariance",
    "scheduler_machine",
)  # fmt: skip
SCHEDULER_TESTS = [f"tests/scheduler/test_{name}.py" for name in SCHEDULER]
#: Source file or folder -> the fast tests that should notice a change there.
TESTS = {
    "src/octavo/scheduler": SCHEDULER_TESTS,
    "src/octavo/memory": [
        "tests/memory",
        "tests/scheduler/test_scheduler.py",
        "tests/scheduler/test_schedule_invariance.py",
    ],
    "src/octavo/kernels/reference/sampling.py": [
        "tests/kernels/test_sampling_reference.py",
        "tests/kernels/test_native_sampling.py::test_each_stage_draws_what_the_reference_draws",
    ],
    "src/octavo/engine/requests.py": ["tests/engine/test_requests.py", "tests/engine/test_known_output.py"],
    "src/octavo/engine/batch.py": ["tests/engine/test_batch.py", "tests/engine/test_llm.py"],
    "src/octavo/engine/engine.py": [
        "tests/engine/test_engine.py",
        "tests/engine/test_async_engine.py",
        "tests/engine/test_engine_survives.py",
        "tests/engine/test_matchers.py",
    ],
    "src/octavo/engine/output_processor.py": [
        "tests/engine/test_output_processor.py",
        "tests/engine/test_known_output.py",
        "tests/engine/test_engine.py",
        "tests/engine/test_async_engine.py",
        "tests/engine/test_engine_survives.py",
    ],
    "src/octavo/engine/resolve_config.py": ["tests/engine/test_resolve_config.py"],
    "src/octavo/text/stop_matcher.py": ["tests/text/test_stop_matcher.py"],
    "src/octavo/text/detokenizer.py": ["tests/text/test_detokenizer.py"],
    "src/octavo/text/byte_pair.py": ["tests/text/test_tokenizer_folder.py", "tests/text/test_tokenizer_gguf.py"],
    "src/octavo/text/sentencepiece.py": ["tests/text/test_sentencepiece.py", "tests/text/test_tokenizer_gguf.py"],
}
SKIP = {"check_integrity", "__repr__"}  # functions that only check or show
WALL_S = 300.0  # of one mutant: for those that wait without using the CPU

COMPARE = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
SWAPS = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    path: str
    line: int
    what: str
    source: str  # of the whole module


def variants(node: ast.AST) -> Iterator[tuple[str, ast.AST | None]]:
    """What ``node`` may be replaced by, and its description; None for a statement that is dropped."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARE:
            new.ops[0] = COMPARE[type(op)]()
            yield "comparison", new
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            new.op = ARITHMETIC[type(op)]()
            yield "arithmetic", new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield "and/or", new
        case ast.UnaryOp(op=ast.Not()):
            yield "not", new.operand
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPS:
            new.func = ast.Name(SWAPS[name], ast.Load())
            yield "min/max", new
        case ast.If(test=ast.Name() | ast.Attribute() | ast.Call()):
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition", new
        case ast.Continue():
            yield "continue", ast.Break()
        case ast.Break():
            yield "break", ast.Continue()
    match node:
        case ast.Expr(value=ast.Call()) | ast.Assign() | ast.AugAssign() | ast.Delete():
            yield "dropped", None


def places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Every (parent, field, index) whose node may be changed. Not: annotations, assertions, errors, decorators."""
    stack: list[ast.AST] = [tree]
    while stack:
        parent = stack.pop()
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.AST) or isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr):
                    continue
                if isinstance(node, ast.FunctionDef) and node.name in SKIP:
                    continue
                if isinstance(node, ast.Assign) and "__slots__" in ast.unparse(node.targets[0]):
                    continue
                yield parent, field, index
                stack.append(node)


def mutants_of(path: str) -> list[Mutant]:
    """All of one file, in order of lines."""
    tree, found = ast.parse((ROOT / path).read_text(encoding="utf-8")), []
    for parent, field, index in list(places(tree)):
        siblings = getattr(parent, field)
        node = siblings if index is None else siblings[index]
        for what, new in variants(node):
            put(parent, field, index, ast.Pass() if new is None else new)
            after = "" if new is None else " -> " + ast.unparse(ast.fix_missing_locations(new)).splitlines()[0]
            description = f"{what}: {ast.unparse(node).splitlines()[0]}{after}"
            source = ast.unparse(ast.fix_missing_locations(tree))
            found.append(Mutant(path, getattr(node, "lineno", 0), description, source))
            put(parent, field, index, node)
    return sorted(found, key=lambda mutant: mutant.line)


def put(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


class Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.name = ".".join(Path(mutant.path).with_suffix("").parts[1:])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(ROOT / self.mutant.path)
        exec(compile(self.mutant.source, module.__file__, "exec"), vars(module))


def run_tests(tests: list[str], mutant: Mutant | None, cpu_s: float) -> tuple[int, float]:
    """Run ``tests`` in a process of their own -> (0: all passed, the CPU seconds that it took)."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
            if mutant is not None:
                sys.meta_path.insert(0, Hook(mutant))
            options = ["-q", "-x", "-m", "not slow", "-k", "not planted", "-p", "no:cacheprovider", "-p", "no:xdist"]
            options += ["--hypothesis-profile=mutants", "--hypothesis-seed=0", "-W", "ignore::pytest.PytestWarning"]
            code = int(pytest.main([*options, *tests]))
        finally:
            os._exit(code)
    deadline = time.monotonic() + WALL_S
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            deadline += WALL_S
        time.sleep(0.02)


def tests_for(path: str) -> list[str]:
    return next(tests for prefix, tests in TESTS.items() if path.startswith(prefix))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=list(TESTS), help="source files or folders")
    parser.add_argument("--sample", type=int, default=None, help="mutants per file, at most")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this long")
    args = parser.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, "")
    deadline = time.monotonic() + 60 * args.minutes
    survived = 0
    for path in args.paths:
        files = [path] if path.endswith(".py") else sorted(map(str, Path(path).glob("*.py")))
        for file in files:
            tests = tests_for(file)
            mutants = mutants_of(file)
            if not mutants:
                continue
            status, baseline_s = run_tests(tests, None, 600)
            if status:
                raise SystemExit(f"{file}: its tests fail without any change: {' '.join(tests)}")
            chosen = (
                mutants if args.sample is None else random.Random(0).sample(mutants, min(args.sample, len(mutants)))
            )
            alive = tried = 0
            for mutant in sorted(chosen, key=lambda m: m.line):
                if time.monotonic() > deadline:
                    break
                tried += 1
                status, _ = run_tests(tests, mutant, 4 * baseline_s + 5)
                if status == 0:
                    alive += 1
                    print(f"  {mutant.path}:{mutant.line}: {mutant.what}", flush=True)
            survived += alive
            print(f"{file}: {alive} of {tried} survived ({len(mutants)} there are)", flush=True)
    raise SystemExit(1 if survived else 0)


if __name__ == "__main__":
    import pytest  # before forking: what no mutant changes is imported once
    from hypothesis import HealthCheck, Phase, settings

    settings.register_profile(  # a failure need not be shrunk, nor remembered
        "mutants",
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=HealthCheck,
    )
    main()
