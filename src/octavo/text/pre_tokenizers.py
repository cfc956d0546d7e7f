"""How text is cut before byte-pair encoding, by the name in ``tokenizer.ggml.pre``.

The expressions are facts of the models (GPT-2, Llama 3, Qwen2, SmolLM): they were trained on text cut this way.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from octavo.core.errors import ModelFileError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


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
