"""The fields of a draw as a page: ``python -m octavo.api.sampling_docs > docs/sampling.md``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from octavo.core.sampling_params import stated_fields

_INTRODUCTION = """\
# How tokens are drawn

The fields of `SamplingParams`, which both endpoints take under the same names. Each is stated once, in
`src/octavo/core/sampling_params.py`; this page is written from it, and a test checks that it is up to date.

| field | stage | default | values | meaning |
|---|---|---|---|---|"""


def as_markdown() -> Iterator[str]:
    """``docs/sampling.md``, line by line."""
    yield _INTRODUCTION
    for name, (kind, default, stated) in stated_fields().items():
        values = stated.range.words if stated.range is not None else _values(kind)
        note = "" if stated.in_http else " (1)"
        yield f"| `{name}`{note} | {stated.stage} | {_default(default)} | {values} | {stated.doc} |"
    yield ""
    yield "(1) Over HTTP said otherwise: `bad_words` and `dry_sequence_breakers` are texts; `max_tokens`, `logprobs`"
    yield "and `prompt_logprobs` are OpenAI's, of each endpoint."


def _values(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    return "a list of texts" if kind == tuple[str, ...] else "a list"


def _default(default: object) -> str:
    if default == () or default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"


if __name__ == "__main__":
    print("\n".join(as_markdown()))
