"""Byte-pair encoding on the ``tokenizers`` library."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

# A call encodes one request's text on one of our own worker threads; the library's thread pool would take cores from
# the kernels. Its switch is read when it first encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers.models import BPE
from tokenizers.normalizers import Replace
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.pre_tokenizers import Split

from octavo.core.errors import ModelFileError
from octavo.core.limits import MAX_RUN_CHARS
from octavo.core.steps import Steps
from octavo.text.pre_tokenizers import SEAM_OF_LINES, Cut, build_pre_tokenizer, cut_at_seam
from octavo.text.space_marks import find_space_marks
from octavo.text.vocabulary import SPACE_MARK


class LibraryEncoder:
    """A ``tokenizers`` pipeline without added tokens. It releases the GIL while it encodes.

    later:  the pipeline for texts after a special token, where the other treats the beginning of a text differently
    within: the pipeline for what follows a seam, where the other puts a space before every text
    seam:   matches before places where texts may be cut (``cut_at_seam``); None: nowhere
    """

    def __init__(
        self,
        pipeline: tokenizers.Tokenizer,
        *,
        later: tokenizers.Tokenizer | None = None,
        within: tokenizers.Tokenizer | None = None,
        seam: re.Pattern[str] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._later = later
        self._within = within
        self._seam = seam
        self.max_run = None if seam is None else MAX_RUN_CHARS

    def encode_steps(self, texts: Sequence[str], *, at_start: bool, goes_on: bool = False) -> Steps[list[list[int]]]:
        """Ids of each text. One call: the batch form frees the GIL and keeps no offsets, the single form does not."""
        yield
        if goes_on and self._within is not None:
            return _encode(self._within, texts)
        if self._later is None:
            return _encode(self._pipeline, texts)
        num_first = 1 if at_start else 0
        return _encode(self._pipeline, texts[:num_first]) + _encode(self._later, texts[num_first:])

    def cut(self, text: str, start: int, size: int) -> int:
        """A place where ``text`` may be cut, or its end."""
        return len(text) if self._seam is None else cut_at_seam(text, start, size, self._seam)


def _encode(pipeline: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encodings = pipeline.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def build_byte_pair(vocab: dict[str, int], merges: Sequence[str], hidden: frozenset[str], cut: Cut) -> LibraryEncoder:
    """Byte-pair encoding of a GGUF vocabulary.

    vocab:   token text -> id, without the tokens that no text may produce
    merges:  "left right", best first
    hidden:  texts of the tokens left out of ``vocab``; a merge that makes one is left out too
    cut:     what happens to text before merging
    """
    pairs = _parse_merges(merges)
    options = {"ignore_merges": cut.ignore_merges, "byte_fallback": cut.raw}
    try:
        model = BPE(vocab, pairs, **options)
    except (
        Exception
    ) as error:  # the library raises plain Exception; we check only now, for it takes as long as building
        kept = _check_merges(pairs, vocab, hidden)
        if len(kept) == len(pairs):
            raise ModelFileError(f"the vocabulary and its merges cannot be used: {error}") from error
        model = BPE(vocab, kept, **options)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = build_pre_tokenizer(cut)
    if not cut.raw:
        return LibraryEncoder(pipeline, seam=cut.seam)
    pipeline.normalizer = Replace(" ", SPACE_MARK)
    marks = find_space_marks(vocab)
    if marks is None:
        return LibraryEncoder(pipeline, seam=SEAM_OF_LINES)
    words = Split(tokenizers.Regex(marks.words), "isolated")  # changes no ids, but words are cached
    pipeline.pre_tokenizer = PreTokenizers([pipeline.pre_tokenizer, words])
    return LibraryEncoder(pipeline, seam=re.compile(f"{marks.seam.pattern}|{SEAM_OF_LINES.pattern}"))


def _parse_merges(merges: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    for i, pair in enumerate(pairs) if set(map(len, pairs)) - {2} else ():
        if len(pair) != 2:
            merge = merges[i]
            at = merge.find(" ", 1)  # from 1: a left part may itself begin with a space
            if at < 0:
                raise ModelFileError(
                    f"merge {merge!r:.80} in tokenizer.ggml.merges is not two tokens with a space between"
                )
            pairs[i] = merge[:at], merge[at + 1 :]
    return pairs


def _check_merges(
    pairs: list[tuple[str, str]], vocab: Mapping[str, int], hidden: frozenset[str]
) -> list[tuple[str, str]]:
    """The merges that make no hidden token. Raises ``ModelFileError`` for one whose parts or result are no tokens."""
    kept = []
    for pair in pairs:
        used = (*pair, "".join(pair))
        if unknown := [text for text in used if text not in vocab and text not in hidden]:
            raise ModelFileError(f"tokenizer.ggml.merges uses {unknown[0]!r:.80}, which is no token of the vocabulary")
        if hidden.isdisjoint(used):
            kept.append(pair)
    return kept


def load_pipeline(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The pipeline that a ``tokenizer.json`` describes. Raises ``ModelFileError`` for one that the library refuses."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the library raises plain Exception
        raise ModelFileError(f"tokenizer.json cannot be used: {error}") from error
