"""The price list: what the costliest value of each field that a client may send takes, and who works on it.

The bounds themselves are ``core.limits``. ``docs/limits.md`` is these tables (``python -m octavo.api.price_list >
docs/limits.md``), and ``tests/limits`` sends the costliest admissible request of every row, alone and many at once, and
counts CPU time and memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from octavo.core import limits as most

Who = Literal["event loop", "text workers", "engine thread"]


class Price(NamedTuple):
    """What fields of one kind may cost. Bounds for the default model, some three times what a 2 GHz core took."""

    fields: tuple[str, ...]  # as a client writes them
    limit: str
    who: tuple[Who, ...]  # works on it
    longest_ms: float  # CPU of one callback, piece or turn: what others wait for
    cpu_ms: float  # CPU of one request, kernels left out
    case: str = ""  # what that request is


class ConnectionPrice(NamedTuple):
    """What there may be before there is a request, and after its answer."""

    what: str
    limit: str
    cost: str


#: Fields whose cost grows with what a client sends. All others are one number, one switch or one name of a few.
PRICES: tuple[Price, ...] = (
    Price(
        ("metadata",),
        f"{most.MAX_JSON_VALUES:,} JSON values and {most.MAX_JSON_NUMBERS:,} whole numbers, {most.MAX_JSON_DEPTH} deep",
        ("text workers",),
        45,
        900,
        "any field that is read and not looked at; the whole body counts",
    ),
    Price(
        ("messages",),
        f"{most.MAX_MESSAGES:,} of {most.MAX_PARTS:,} parts, {most.MAX_CHAT_CHARS:,} characters",
        ("text workers",),
        150,
        1200,
    ),
    Price(
        ("prompt",),
        f"{most.MAX_PROMPTS} of {most.MAX_TEXT_CHARS:,} characters, or of token ids that fit the context",
        ("text workers",),
        25,
        900,
    ),
    Price(("n",), f"{most.MAX_N}; {most.MAX_CHOICES:,} choices with all prompts", ("engine thread",), 25, 900),
    Price(
        ("stop",),
        f"{most.MAX_STOP_STRINGS} of {most.MAX_STOP_STRING_CHARS:,} characters",
        ("engine thread",),
        10,
        200,
        "64 tokens that go on matching",
    ),
    Price(
        ("bad_words",),
        f"{most.MAX_BAD_WORDS // 2} of {most.MAX_WORD_CHARS} characters and {most.MAX_BAD_WORD_TOKENS} tokens",
        ("text workers", "engine thread"),
        15,
        200,
        "16 tokens",
    ),
    Price(
        ("logit_bias", "allowed_token_ids", "stop_token_ids"),
        f"{most.MAX_TOKEN_ID_LIST:,} entries each",
        ("text workers", "engine thread"),
        30,
        300,
        "all three, 16 tokens",
    ),
    Price(
        ("dry_sequence_breakers",),
        f"{most.MAX_SEQUENCE_BREAKERS} of {most.MAX_WORD_CHARS} characters",
        ("text workers", "engine thread"),
        75,
        200,
        "16 tokens, half of the vocabulary breaks",
    ),
    Price(
        ("logprobs", "top_logprobs"),
        f"{most.MAX_LOGPROBS} alternatives",
        ("event loop", "engine thread"),
        10,
        700,
        "256 tokens",
    ),
    Price(
        ("prompt_logprobs", "echo"),
        f"{most.MAX_LOGPROBS} alternatives per token of the prompt",
        ("event loop", "engine thread"),
        20,
        1200,
        "4,000 tokens: an answer, or one event of a stream, of megabytes",
    ),
    Price(("return_token_ids",), "ids of prompt and answer", ("event loop",), 12, 150, "4,000 tokens"),
    Price(
        ("chat_template_kwargs",),
        f"{most.MAX_FIELDS} of {most.MAX_FIELD_CHARS:,} characters",
        ("text workers",),
        25,
        150,
    ),
    Price(
        ("model", "cache_salt", "stream_options"),
        f"{most.MAX_FIELD_CHARS:,} characters, {most.MAX_CACHE_SALT_CHARS} for a salt; two switches",
        ("event loop",),
        10,
        100,
    ),
)

CONNECTIONS: tuple[ConnectionPrice, ...] = (
    ConnectionPrice(
        "connections",
        f"`--max-connections`: {most.MAX_CONNECTIONS:,}, or what descriptors allow",
        "6 kB each, 22 kB with headers half sent",
    ),
    ConnectionPrice("headers", f"{most.MAX_HEADER_BYTES:,} bytes in {most.HEADER_TIMEOUT_S:g} s", "4 ms a callback"),
    ConnectionPrice("further requests before an answer", f"{most.MAX_PIPELINED_BYTES:,} bytes", "kept as they are"),
    ConnectionPrice("body", f"{most.MAX_BODY_BYTES:,} bytes in {most.BODY_TIMEOUT_S:g} s", "40 ms, 2,000 callbacks"),
    ConnectionPrice(
        "pieces of a body", f"{most.MAX_BODY_PIECES:,}, and one per {most.MIN_PIECE_BYTES} bytes", "5 us each"
    ),
    ConnectionPrice("unfinished bodies", f"{most.MAX_RECEIVING_BYTES:,} bytes together", "the oldest gives way"),
    ConnectionPrice(
        "texts being read",
        f"{most.MAX_TEXT_JOBS_PER_CLIENT:,} of a client, {most.MAX_TEXT_JOBS:,} in all",
        "then 429; clients take turns of 2 ms",
    ),
    ConnectionPrice(
        "bytes of texts being read",
        f"{most.MAX_TEXT_JOB_BYTES_PER_CLIENT:,} of a client, {most.MAX_TEXT_JOB_BYTES:,} in all",
        "then 429",
    ),
    ConnectionPrice(
        "outputs that are not read",
        f"{most.MAX_UNREAD_BYTES:,} bytes of a prompt, {most.MAX_UNREAD_TOTAL_BYTES:,} in all",
        "then the request ends",
    ),
    ConnectionPrice(
        "a socket that takes nothing", f"{most.WRITE_TIMEOUT_S:g} s", "then it is closed and its request ends"
    ),
)

_INTRODUCTION = """\
# What a client may send, and what it costs

Every bound is checked before the work is done and stated once, in `src/octavo/core/limits.py`. What is over a bound is
refused by name: 400 for a field, 413 for the body, 429 where others must be served first.

This page is written by `python -m octavo.api.price_list > docs/limits.md`; a test checks that it is up to date.

## Fields

The costliest admissible value of each. *Longest* is the CPU time of one callback of the event loop, one piece on a text
worker or one turn of the engine thread: what others wait for. *CPU* is that of one request, kernels left out. Both are
bounds that `tests/limits` holds with the default model, alone and many at once; a Sapphire Rapids core takes about a
third of them. Collecting garbage stands apart: 25 ms at most, which the same test holds; requests leave no cycles, and
all that is alive is looked through when nobody waits. Fields that are not here are one number, one switch or one name.

| field | at most | worked on by | longest, ms | CPU, ms | costliest case |
|---|---|---|---|---|---|"""


def as_markdown() -> Iterator[str]:
    """``docs/limits.md``, line by line."""
    yield _INTRODUCTION
    for price in PRICES:
        names = ", ".join(f"`{name}`" for name in price.fields)
        who = ", ".join(price.who)
        yield f"| {names} | {price.limit} | {who} | {price.longest_ms:g} | {price.cpu_ms:g} | {price.case} |"
    yield "\n## Connections, bodies and readers\n"
    yield "| what | at most | costs |"
    yield "|---|---|---|"
    for what, limit, cost in CONNECTIONS:
        yield f"| {what} | {limit} | {cost} |"


if __name__ == "__main__":
    print("\n".join(as_markdown()))
