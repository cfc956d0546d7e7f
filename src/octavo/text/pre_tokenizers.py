"""How text is cut before byte-pair encoding, by the name in ``tokenizer.ggml.pre``.

The names are those that llama.cpp gives (src/llama-vocab.cpp, b11434), the expressions facts of the models: they were
trained on text cut this way. Where llama.cpp's expressions stand in for something that its regular expressions cannot
say (letters by case, scripts), the ones here are those of the models' own tokenizer.json.

Encoders of other kinds of model (BERT, Jina, ...) are left out, and SuperBPE's cut into numbers alone, which leaves no
bound on what one call has to merge.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

from octavo.core.errors import ModelFileError
from octavo.core.limits import MAX_MERGE_CHARS
from octavo.text.vocabulary import DISGUISES

#: Characters of text that are encoded in one call: 3 ms of English, 10 ms of digits.
PIECE_CHARS = 1 << 13

# Seams are places where every expression of a cut ends a match and begins the next, whatever stands around, and which
# none looks across. The letters are of blocks that every version of Unicode has, so that the library and this module
# cannot disagree about one. U+180E has once been white space.
_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03c9\u0410-\u044f\u05d0-\u05ea\u0620-\u064a"
    "\u0e01-\u0e30\u3041-\u3093\u30a1-\u30f6\u4e00-\u9fa5\uac00-\ud7a3"
)
_ENDS_WORD = r"\n0-9.,;:!?()\[\]{}\"<>=+*/\u3001\u3002\uff0c\uff01\uff1f"
_BEFORE_SPACE = rf"[^\s\u180e{DISGUISES}](?= )"
_AFTER_LETTER = rf"[{_LETTERS}](?=[{_ENDS_WORD}])"  # no apostrophe: contractions begin with it
_AFTER_DIGIT = r"[0-9](?=[A-Za-z])"
SEAM = re.compile(rf"{_BEFORE_SPACE}|{_AFTER_LETTER}|{_AFTER_DIGIT}")
_SEAM_OF_WORDS = re.compile(rf"[{_LETTERS}](?=[ {_ENDS_WORD}])|{_AFTER_DIGIT}")  # other characters may stick to a space
_SEAM_OF_ASCII_WORDS = re.compile(rf"[A-Za-z](?=[ {_ENDS_WORD}])|{_AFTER_DIGIT}")
_SEAM_OF_PHRASES = re.compile(rf"[A-Za-z](?=[\n0-9])|{_AFTER_DIGIT}")  # words with the spaces between them
_SEAM_BEFORE_SPACE = re.compile(rf"[{_LETTERS}](?= )")
_SEAM_BUT_DIGITS = re.compile(rf"{_BEFORE_SPACE}|{_AFTER_LETTER}")
SEAM_OF_LINES = re.compile(rf"[^\n{DISGUISES}](?=\n)|\n(?=[^\n{DISGUISES}])")


@dataclass(frozen=True, slots=True)
class Cut:
    """Expressions applied one after the other to what the one before left, and habits of the model family.

    raw: the vocabulary spells text as SentencePiece does, spaces as U+2581 and characters as they are, not as bytes
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token as it stands is taken whole
    add_bos: bool = False  # where the file does not say
    raw: bool = False
    seam: re.Pattern[str] = SEAM


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CAPITALS, _SMALL = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(suffix: str, rest: str, capitals: str = _CAPITALS, small: str = _SMALL) -> str:
    """Words that begin anew where a capital follows a small letter: "camelCase" is two."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}[{capitals}]*[{small}]+{suffix}|{before}[{capitals}]+[{small}]*{suffix}|{rest}"


_GPT4O = _cased(f"{_CONTRACTIONS}?", rf"\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_TEKKEN = _cased("", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_YOUTU = _cased(f"{_CONTRACTIONS}?", rf"\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI = r"\p{Han}+|" + _cased(
    f"{_CONTRACTIONS}?", rf"\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}", _CAPITALS + _NOT_HAN, _SMALL + _NOT_HAN
)
_ASCII_MARK = "[!\"#$%&'()*+," r"\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORDS = rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
_SPARK = (*_DEEPSEEK3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}")
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_LETTERS_WITH_CASE = (  # of DeepSeek LLM's tokenizer.json
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_LETTERS_WITH_CASE}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"(?<!\s)\s++$",  # \s+$, in time linear in the spaces
    _CJK,
    r"\p{N}+",
)
# Digits in threes from the right: a number apart, its first one or two where threes follow, then threes. One
# expression that looks ahead from each three would take the square of the digits.
_FIRST_OF_THREES = r"\A{digit}{{1,2}}(?=(?:{digit}{{3}})+\z)"
_TINY_AYA = (r"(?<!\d)\d++\b", _FIRST_OF_THREES.format(digit=r"\d"), _GPT4O)
_SCRIPTS = (  # Chinese, Japanese, Thai, Lao, Khmer, Burmese, Korean
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE = (
    r"\p{N}+",
    _FIRST_OF_THREES.format(digit=r"\p{N}"),
    r"\p{N}{1,3}",
    _SCRIPTS,
    rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}",
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HANGUL_AND_KIN = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_CHAMELEON = (
    "<sentinel:[0-9]+>",
    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"([\t\n]|    |  )",
    r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_JAIS2 = _LLAMA3.replace(
    r"\s+(?!\S)|\s+",
    "".join(rf"\s{{{n}}}(?!\S)|" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")) + r"\s",
)
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_LINES = r"[^\n]+|\n+"

_LLAMA3_CUT = Cut((_LLAMA3,), ignore_merges=True, add_bos=True)

_ROWS: tuple[tuple[str, Cut], ...] = (
    ("default", Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    (
        "gpt-2 gpt2 mpt olmo phi-2 jais trillion granite-docling gigachat a.x-4.0 mellum exaone4",
        Cut((_GPT2,)),
    ),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", Cut((r"\p{N}", _GPT2))),
    ("falcon", Cut((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", _LLAMA3_CUT),
    ("dbrx smaug-bpe glm4 chatglm-bpe", Cut((_LLAMA3,))),
    ("glm5", Cut((_LLAMA3,), ignore_merges=True)),
    ("jais-2", Cut((_JAIS2,))),
    ("minicpm5", Cut((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez kormo f2llmv2 hunyuan solar-open grok-2",
        Cut((_QWEN2,)),
    ),
    ("qwen35", Cut((_QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}"),))),
    ("laguna", Cut((_LINES, _QWEN2))),
    ("ufakzeka", Cut((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),))),
    ("seed-coder", Cut((_QWEN2.replace(_MARKS, r" ?[^\s\p{L}\p{N}\r\n]+"),))),
    ("bailingmoe bailingmoe2 llada-moe", Cut((_BAILING,))),
    ("exaone-moe", Cut((_EXAONE_MOE,), seam=_SEAM_OF_PHRASES)),
    ("tekken", Cut((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", Cut((_GPT4O,))),
    ("tiny_aya cohere2moe", Cut(_TINY_AYA, seam=_SEAM_BUT_DIGITS)),
    ("youtu", Cut((_HANGUL_AND_KIN, _YOUTU), ignore_merges=True)),
    ("kimi-k2", Cut((_KIMI,))),
    ("deepseek-llm", Cut(_DEEPSEEK_LLM, seam=_SEAM_OF_ASCII_WORDS)),
    (
        "deepseek-coder",
        Cut((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"), seam=_SEAM_OF_WORDS),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", Cut(_DEEPSEEK3)),
    ("spark2_5", Cut(_SPARK)),
    ("afmoe", Cut(_AFMOE)),
    ("poro-chat bloom gpt3-finnish", Cut((_BLOOM,), seam=_SEAM_BEFORE_SPACE)),
    ("viking", Cut((_BLOOM, r"\p{N}"), seam=_SEAM_BEFORE_SPACE)),
    ("chameleon", Cut(_CHAMELEON, add_bos=True)),
    ("gemma4", Cut((_LINES,), add_bos=True, raw=True)),
    ("sarvam-moe", Cut((_LINES,), raw=True)),
)
PRE_TOKENIZERS: dict[str, Cut] = {name: cut for names, cut in _ROWS for name in names.split()}

# What tokenizer.json files are made of: expressions that may be combined, and combinations that are known as a whole.
PATTERNS = frozenset(
    pattern
    for cut in PRE_TOKENIZERS.values()
    if cut.seam is SEAM and not cut.raw
    for pattern in cut.patterns
    if r"\A" not in pattern  # that one sees where a text was cut
)
WORD_PATTERNS = frozenset(p for p in PATTERNS if r"\p{L}+" in p)  # those that cut at every seam
SEAMS = {cut.patterns: cut.seam for cut in PRE_TOKENIZERS.values() if not cut.raw}
_LOOK = 1 << 9  # characters that are searched for seams at a time


def cut_at_seam(text: str, start: int, size: int, seam: re.Pattern[str] = SEAM) -> int:
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


def find_cut(name: str) -> Cut:
    """The cut of that name; raises ``ModelFileError`` with the nearest known ones."""
    cut = PRE_TOKENIZERS.get(name)
    if cut is None:
        near = difflib.get_close_matches(name[:80], PRE_TOKENIZERS, n=3, cutoff=0.6)
        others = f"nearest to it: {', '.join(near)}" if near else f"it has {', '.join(sorted(PRE_TOKENIZERS))}"
        raise ModelFileError(f"tokenizer.ggml.pre is {name!r:.80}, which octavo does not have; {others}")
    return cut


def build_pre_tokenizer(cut: Cut) -> PreTokenizer:
    """The cut as a ``tokenizers`` pre-tokeniser, which ends in byte-level spelling unless the cut is raw."""
    splits = [Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    return Sequence(splits if cut.raw else [*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
