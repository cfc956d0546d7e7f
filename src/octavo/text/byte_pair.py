"""Byte-pair encoding on the ``tokenizers`` library."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

# A call encodes one request's text on one of our own worker threads; the library's thread pool would take cores from
# the kernels. Its switch is read when it first encodes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers
from tokenizers.models import BPE

from octavo.core.errors import ModelFileError
from octavo.core.limits import MAX_RUN_CHARS
from octavo.core.steps import Steps
from octavo.text.pre_tokenizers import build_pre_tokenizer, cut_at_seam, find_cut


class LibraryEncoder:
    """A ``tokenizers`` pipeline without added tokens. It releases the GIL while it encodes.

    later:    the pipeline for texts after a special token, where the other treats the beginning of a text differently
    has_seams: texts may be cut where ``cut_at_seam`` says
    """

    def __init__(
        self, pipeline: tokenizers.Tokenizer, later: tokenizers.Tokenizer | None = None, *, has_seams: bool = False
    ) -> None:
        self._pipeline = pipeline
        self._later = later
        self._has_seams = has_seams
        self.max_run = MAX_RUN_CHARS if has_seams else None

    def encode_steps(self, texts: Sequence[str], *, at_start: bool, goes_on: bool = False) -> Steps[list[list[int]]]:
        """Ids of each text. One call: the batch form frees the GIL and keeps no offsets, the single form does not."""
        yield
        if self._later is None:
            return _encode(self._pipeline, texts)
        num_first = 1 if at_start else 0
        return _encode(self._pipeline, texts[:num_first]) + _encode(self._later, texts[num_first:])

    def cut(self, text: str, start: int, size: int) -> int:
        """A place where ``text`` may be cut, or its end."""
        return cut_at_seam(text, start, size) if self._has_seams else len(text)


def _encode(pipeline: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    encodings = pipeline.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def build_byte_level(vocab: dict[str, int], merges: Sequence[str], hidden: frozenset[str], pre: str) -> LibraryEncoder:
    """Byte-level BPE of a GGUF ``gpt2`` vocabulary.

    vocab:   token text -> id, without the tokens that no text may produce
    merges:  "left right", best first
    hidden:  texts of the tokens left out of ``vocab``; a merge that makes one is left out too
    pre:     name of the cut before merging
    """
    cut = find_cut(pre)
    pairs = _parse_merges(merges)
    try:
        model = BPE(vocab, pairs, ignore_merges=cut.ignore_merges)
    except (
        Exception
    ) as error:  # the library raises plain Exception; we check only now, for it takes as long as building
        kept = _check_merges(pairs, vocab, hidden)
        if len(kept) == len(pairs):
            raise ModelFileError(f"the vocabulary and its merges cannot be used: {error}") from error
        model = BPE(vocab, kept, ignore_merges=cut.ignore_merges)
    pipeline = tokenizers.Tokenizer(model)
    pipeline.pre_tokenizer = build_pre_tokenizer(cut)
    return LibraryEncoder(pipeline, has_seams=True)


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
