"""Text out of a file that nobody vouches for, fit to be shown."""

from __future__ import annotations


def plain(text: str, limit: int = 600) -> str:
    """``text`` without control characters, about ``limit`` long at most: a name in a file can be a megabyte of them."""
    if len(text) > limit:
        text = f"{text[: limit // 2]} ... {text[-limit // 2 :]}"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
