"""Hold the sizes that docs/architecture.md promises: small enough to be read.

    python scripts/check_sizes.py           # says every file and function that is too long, and how large the core is

Lines of code: without blank lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "octavo"
CORE = ("core", "memory", "scheduler", "engine")
MAX_CORE_LINES = 4000
APART = {Path("scheduler/speculation.py")}  # has room of its own
MAX_FILE_LINES = 500  # all of them
MAX_FUNCTION_LINES = 80  # from its def to its end


def code_lines(source: str) -> int:
    """Lines that hold code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            found |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return found


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def main() -> None:
    problems, core = [], 0
    for path in sorted(ROOT.rglob("*.py")):
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT)
        if name.parts[0] in CORE and name not in APART:
            core += code_lines(source)
        if (count := source.count("\n")) > MAX_FILE_LINES:
            problems.append(f"{name} has {count} lines; at most {MAX_FILE_LINES}")
        problems += [
            f"{name}: {function}() has {count} lines; at most {MAX_FUNCTION_LINES}"
            for function, count in functions(ast.parse(source))
            if count > MAX_FUNCTION_LINES
        ]
    if core > MAX_CORE_LINES:
        problems.append(f"{', '.join(CORE)} have {core} lines of code; at most {MAX_CORE_LINES} together")
    print(f"{', '.join(CORE)}: {core} of {MAX_CORE_LINES} lines of code")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
