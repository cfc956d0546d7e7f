"""How text is cut before byte-pair encoding, by the name in ``tokenizer.ggml.pre``.

The expressions are facts of the models (GPT-2, Llama 3, Qwen2, SmolLM): they were trained on text cut this way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from octavo.core.errors import ModelFileError
from octavo.core.limits import MAX_MERGE_CHARS

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


#: Characters of text that are encoded in one call: 3 ms of English, 10 ms of digits.
PIECE_CHARS = 1 << 13


@dataclass(frozen=True, slots=True)
class _Cut:
    """Expressions applied one after the other to what the one before left, and two habits of the model family."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as it stands is taken whole
    add_bos: bool = False  # where the file does not say


_GPT2_CUT = _Cut((_GPT2,))
_DIGITS_APART = _Cut((r"\p{N}", _GPT2))
_QWEN2_CUT = _Cut((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),))
_LLAMA3_CUT = _Cut((_LLAMA3,), ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, _Cut] = {
    "default": _Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_CUT,
    "gpt2": _GPT2_CUT,
    "mpt": _GPT2_CUT,
    "olmo": _GPT2_CUT,
    "phi-2": _GPT2_CUT,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "llama-bpe": _LLAMA3_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "smaug-bpe": _Cut((_LLAMA3,)),
    "dbrx": _Cut((_LLAMA3,)),
    "qwen2": _QWEN2_CUT,
    "deepseek-r1-qwen": _QWEN2_CUT,
    "stablelm2": _QWEN2_CUT,
}


# Seams. Every expression above ends a match between a character that is no white space and a space, between a letter
# and one of the characters below (no apostrophe: contractions begin with it), and between a digit and a letter; the
# next match begins there; and none looks back, or, having ended with such a character, ahead. The letters are of blocks
# that every version of Unicode has, so that the library and this module cannot disagree about one. U+180E has once been
# white space, and private-use characters may be a disguise (chat_template.py).
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea\u0620-\u064a"
    "\u0e01-\u0e30\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5\uac00-\ud7a3"
)
_SEAM = re.compile(
    r"[^\s\u180e\ue000-\uf8ff](?= )"
    rf"|[{_LETTERS}](?=[\n0-9.,;:!?()\[\]{{}}\"<>=+*/\u3001\u3002\uff0c\uff01\uff1f])"
    r"|[0-9](?=[A-Za-z])"
)
PATTERNS = frozenset(pattern for cut in PRE_TOKENIZERS.values() for pattern in cut.patterns)
WORD_PATTERNS = frozenset(pattern for pattern in PATTERNS if r"\p{L}+" in pattern)  # those that cut at every seam
_LOOK = 1 << 9  # characters that are searched for seams at a time


def cut_at_seam(text: str, start: int, size: int, seam: re.Pattern[str] = _SEAM) -> int:
    """The last seam up to ``start + size``, else the next one, else the end. A seam lies behind a match of ``seam``.

    A server refuses a text that goes without one for much less than is looked through here.
    """
    stop = start + size
    if stop >= len(text):
        return len(text)
    for end in range(stop, start, -_LOOK):
        found = list(seam.finditer(text, max(start, end - _LOOK - 1), end + 1))  # + 1: what the seam looks ahead to
        if found:
            return found[-1].end()
    for begin in range(stop - 1, min(len(text), stop + 4 * MAX_MERGE_CHARS), PIECE_CHARS):
        later = seam.search(text, begin, begin + PIECE_CHARS + 2)
        if later is not None:
            return later.end()
    return len(text)


def find_cut(name: str) -> _Cut:
    """The cut of that name; raises ``ModelFileError`` listing the known ones."""
    cut = PRE_TOKENIZERS.get(name)
    if cut is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r:.80}, which octavo does not have; it has {known}")
    return cut


def build_pre_tokenizer(cut: _Cut) -> PreTokenizer:
    """The cut as a ``tokenizers`` pre-tokeniser that ends in byte-level spelling."""
    splits = [Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
