"""Which tokens end a turn or a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import takewhile

from jinja2.exceptions import TemplateError

from octavo.text.template_budget import RenderLimit
from octavo.text.template_filters import words
from octavo.text.template_probe import probe
from octavo.text.template_sandbox import EXPRESSION_ERRORS, compile_template
from octavo.text.tokenizer_parts import LOOKS_LIKE_CONTROL
from octavo.text.vocabulary import CONTROL_KINDS, TokenKind, not_normal

# Names under which well-known models end a turn or a text (llama.cpp's list, src/llama-vocab.cpp, less its tokens for
# filling in code); a file often marks only one of its own as "eos".
_END_NAMES = words(
    "<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> <|end|> <end_of_turn> <|end_of_turn|> <|return|> "
    "<|call|> <|calls|> <|flush|> <turn|> <|tool_response> <end_of_utterance> [e~[ "
    "<\uff5cend\u2581of\u2581sentence\uff5c>"
)
_END_NAMES_IF_CONTROL = words("</s> <eos> <EOT> _<EOT> [EOT] [EOS]")  # text may well contain these
# Where one of these pairs is there too, this one only ends a message, and another message follows (gpt-oss, Solar).
_END_OF_MESSAGE = "<|end|>"
_ENDS_INSTEAD = (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))
_ANSWER, _LAST_ANSWER = "octavo answers", "octavo answers again"
_CHAT = (
    {"role": "user", "content": "octavo asks"},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": "octavo asks again"},
    {"role": "assistant", "content": _LAST_ANSWER},
)
FindToken = Callable[[str], tuple[int, str] | None]


def ends_by_name(texts: Sequence[str], kinds: Sequence[int]) -> set[int]:
    """Ids of the tokens under whose names well-known models end a turn or a text, whatever their kinds."""
    known = _END_NAMES | _END_NAMES_IF_CONTROL
    found = [(text, i) for i, text in enumerate(texts) if text in known]
    ids = {text: i for text, i in found if text in _END_NAMES or kinds[i] in CONTROL_KINDS}
    if any(ids.keys() >= {*pair, _END_OF_MESSAGE} for pair in _ENDS_INSTEAD):
        del ids[_END_OF_MESSAGE]
    return set(ids.values())


def ends_by_template(
    template: str | None, texts: Sequence[str], kinds: Sequence[int], *, bos: int | None, eos: int | None
) -> set[int]:
    """Ids of the tokens with which the chat template ends an answer: the model was trained to, whatever the file says.
    They may be of any kind, if they look like control tokens.
    """
    if template is None:
        return set()
    names = {name: texts[i] for name, i in (("bos_token", bos), ("eos_token", eos)) if i is not None}
    special = {texts[i]: i for i in not_normal(kinds) if kinds[i] in (*CONTROL_KINDS, TokenKind.USER_DEFINED)}

    @cache
    def like_control() -> dict[str, int]:
        return {text: i for i, text in enumerate(texts) if LOOKS_LIKE_CONTROL.fullmatch(text)}

    def find(text: str) -> tuple[int, str] | None:
        found = _longest_prefix(text, special)
        return _longest_prefix(text, like_control()) if found is None and text[0] in "<[" else found

    return set(ends_of_answer(template, names, bos, find))


def ends_of_answer(template: str, names: Mapping[str, str], bos: int | None, find: FindToken) -> frozenset[int]:
    """The special tokens with which the template ends an answer: one, mostly.

    names: its variables ``bos_token`` and ``eos_token``
    bos:   the id of the first
    find:  text -> the special token that it begins with, and the rest

    They are those that stand both behind the last answer and behind one that is followed by a question, up to the one
    that begins turns: Command R7B closes an answer, then the turn; Phi-3 writes its EOS behind the whole chat, which is
    no end of an answer. Where the two have none in common it is the first behind the last answer (gpt-oss ends that one
    otherwise), and where that is followed by nothing, what begins the next turn, which is where GLM's models stop.
    None for templates that go on in plain text, or fail.
    """
    first, last, inner = (_special_run(text, find) for text in _parts(template, tuple(sorted(names.items()))))
    begin = next((token for token in first if token != bos), next(iter(first), None))
    shared = [a for a, b in takewhile(lambda pair: pair[0] == pair[1] != begin, zip(last, inner, strict=False))]
    return frozenset(shared or [*last, *inner][:1])


def _special_run(text: str, find: FindToken) -> list[int]:
    """The special tokens that ``text`` begins with, white space between them aside."""
    found: list[int] = []
    while (text := text.lstrip()) and (token := find(text)) is not None:
        token_id, text = token
        found.append(token_id)
    return found


@lru_cache(maxsize=8)
def _parts(template: str, names: tuple[tuple[str, str], ...]) -> tuple[str, str, str]:
    """A chat, and of it what stands behind the last answer, and behind one before; "" where the template fails."""
    variables = {**dict(names), "messages": _CHAT, "add_generation_prompt": False}
    try:
        text = probe(compile_template(template), variables) or ""
    except (RenderLimit, TemplateError, SyntaxError, *EXPRESSION_ERRORS):
        return "", "", ""  # whoever chats with it will be told
    before, found, behind_last = text.rpartition(_LAST_ANSWER)
    return (text, behind_last, before.partition(_ANSWER)[2]) if found else ("", "", "")


def _longest_prefix(text: str, ids: Mapping[str, int]) -> tuple[int, str] | None:
    lengths = sorted({len(name) for name in ids if name}, reverse=True)
    return next(((ids[text[:size]], text[size:]) for size in lengths if text[:size] in ids), None)
