"""The guard's worker with slowdowns planted in the prefix tree, the detokeniser and the choice of kernels."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import worker

from octavo.memory.prefix_tree import Match, PrefixTree
from octavo.text.detokenizer import Detokenizer

_find = PrefixTree.find


def find_twice_over_the_tokens(self: PrefixTree, tokens: Sequence[int], limit: int, salt: bytes) -> Match:
    for token in tokens:
        assert token >= 0
    return _find(self, tokens, limit, salt)


def push_without_the_fast_path(self: Detokenizer, token_id: int) -> str:
    text = self._decode(self._bytes_by_id[token_id])
    self.pending = self._decoder.getstate()[0] != b""
    self.num_chars += len(text)
    return text


PrefixTree.find = find_twice_over_the_tokens  # type: ignore[method-assign]
Detokenizer.push = push_without_the_fast_path  # type: ignore[method-assign]
os.environ["OCTAVO_ISA"] = "generic"  # what is left when a kernel is not chosen

if __name__ == "__main__":
    worker.main(sys.argv[1], sys.argv[2:])
