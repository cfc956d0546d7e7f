"""Names of tensors: those that the code uses, and those that weight files have for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LAYER = re.compile(r"\.(0|[1-9][0-9]{0,4})(?=\.)")
_KINDS = ("weight", "bias")


class TensorNames:
    """An architecture's tensors under three names, without the ``.weight`` or ``.bias`` that follows; {i}: the layer.

    ``{"layers.{i}.q": ("blk.{i}.attn_q", "model.layers.{i}.self_attn.q_proj")}``: canonical, GGUF, Hugging Face.
    """

    def __init__(self, names: Mapping[str, tuple[str, str]]) -> None:
        self._to_gguf = {name: gguf for name, (gguf, _) in names.items()}
        self._from_gguf = {gguf: name for name, (gguf, _) in names.items()}
        self._from_hf = {hf: name for name, (_, hf) in names.items()}

    def from_gguf(self, file_name: str) -> str:
        """The canonical name; a name without a counterpart is given as it is."""
        return _translated(file_name, self._from_gguf) or file_name

    def from_hf(self, file_name: str) -> str:
        """The canonical name; a name without a counterpart is given as it is."""
        return _translated(file_name, self._from_hf) or file_name

    def to_gguf(self, name: str) -> str:
        """The GGUF name of a canonical one. KeyError if there is none."""
        found = _translated(name, self._to_gguf)
        if found is None:
            raise KeyError(name)
        return found


def part_of(name: str) -> str:
    """What a canonical name is of in its layer: ``layers.3.q.weight`` -> ``q``."""
    return name.split(".")[-2]


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.search(stem)
    if layer is not None:
        stem = f"{stem[: layer.start()]}.{{i}}{stem[layer.end() :]}"
    found = table.get(stem)
    if found is None or kind not in _KINDS:
        return None
    return f"{found.replace('{i}', layer[1]) if layer is not None else found}.{kind}"
