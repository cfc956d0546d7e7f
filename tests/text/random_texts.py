"""Random texts for comparing tokenizers: words that expressions cut differently, and characters of many scripts."""

from __future__ import annotations

import random
from collections.abc import Sequence

_WORDS = (
    "hello", "Hell", "HELLO", "camelCase", "HTTPServer", "o'r", "don't", "I'M", "we'll", "'s", "'S", " ", "  ", "   ",
    "    ", "\n", "\n\n", "\r\n", "\t", " \n ", ".", "...", "12", "3456", "1234567", "é", "e\u0301", "Я", "пРивет",
    "你好", "世界。", "\uff0c", "ﾊ", "カタカナ", "한국어", "\u00a0", "\u3000", "\u200d", "👍🏽", "ß", "İ", "¼", "Ⅷ",
    "_", "-", "(", ")", "=", "/", "//", "aaa", "\U0001f600", "क्", "नमस्ते", "ิ", "ไทย", "العربية", "Ελλ", "ǅ", "ª", "²",
    "٣", "$", "+", "<", ">", "|", "`", "^", "~", "#", "{", "}", "x_y", "a1b2", "1a", "\u03b11", "\u0300", "\uff01", "“",
    "…", "\u2581", "</",
)  # fmt: skip
_BLOCKS = (
    *((0x20, 0x7F),) * 4,
    *((0x00, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE80), (0x1E00, 0x2200), (0x2200, 0x2C00)),
    *((0x3000, 0x3200), (0x4E00, 0x4F00), (0xAC00, 0xAD00), (0xFF00, 0xFFF0), (0x1F300, 0x1F700), (0x20000, 0x20100)),
)


def random_texts(count: int, *, seed: int, special: Sequence[str] = ()) -> list[str]:
    """``count`` texts of up to some fifty characters; a third of them hold one or two of ``special``."""
    draw = random.Random(seed)

    def piece() -> str:
        if draw.random() < 0.7:
            return draw.choice(_WORDS)
        first, end = draw.choice(_BLOCKS)
        return "".join(chr(draw.randrange(first, end)) for _ in range(draw.randint(1, 3)))

    texts = []
    for _ in range(count):
        pieces = [piece() for _ in range(draw.randint(1, 14))]
        if special and draw.random() < 0.35:
            for _ in range(draw.randint(1, 2)):
                pieces.insert(
                    draw.randrange(len(pieces) + 1), draw.choice(special) + draw.choice(("", " ", "\n", " \n"))
                )
        texts.append("".join(pieces))
    return texts
