"""One model in several GGUF files: ``NAME-00001-of-00003.gguf`` and so on, as llama-gguf-split writes them.

Each part is a GGUF file with its own tensors; the first has the metadata. ``split.no`` counts from 0, ``split.count``
is the number of parts, ``split.tensors.count`` that of all tensors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.weights.gguf_file import MAX_ENTRIES, GGUFFile, GGUFTensor
from octavo.weights.mapped_file import confined
from octavo.weights.messages import plain

MAX_PARTS = 256
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """A GGUF file, with its other parts if it is the first of several. Every error is a ``ModelFileError``."""
    first = GGUFFile(path)
    try:
        count = _whole(first, "split.count", 1)
        return first if count == 1 else SplitGGUF(first, count)
    except BaseException:
        first.close()
        raise


def is_one_model(paths: list[Path]) -> bool:
    """Whether these files, sorted by name, are all parts of one model, going by their names."""
    named = _PART.fullmatch(paths[0].name)
    return named is not None and [path.name for path in paths] == [
        part_name(named["stem"], number, len(paths)) for number in range(len(paths))
    ]


def part_name(stem: str, number: int, count: int) -> str:
    """The name of a part; ``number`` counts from 0."""
    return f"{stem}-{number + 1:05}-of-{count:05}.gguf"


class SplitGGUF(GGUFFile):
    """All parts as one file: the first one's metadata, everybody's tensors."""

    def __init__(self, first: GGUFFile, count: int) -> None:
        """first: the opened first part; count: parts that it announces."""
        self.path, self.metadata = first.path, first.metadata
        self._parts = [first]
        try:
            self._open_rest(count)
            self._owner: dict[str, GGUFFile] = {}
            tensors: dict[str, GGUFTensor] = {}
            for part in self._parts:
                for name, tensor in part.tensors.items():
                    if name in tensors:
                        raise ModelFileError(
                            plain(f"tensor {name!r} is in {self._owner[name].path} and in {part.path}")
                        )
                    tensors[name], self._owner[name] = tensor, part
            announced = _whole(first, "split.tensors.count", len(tensors))
            if announced != len(tensors) or len(tensors) > MAX_ENTRIES:
                raise ModelFileError(f"{first.path} announces {announced} tensors but its parts hold {len(tensors)}")
        except BaseException:
            self.close()
            raise
        self.tensors: Mapping[str, GGUFTensor] = MappingProxyType(tensors)
        self.fingerprint = sha256("".join(part.fingerprint for part in self._parts).encode()).hexdigest()[:16]

    def data(self, name: str) -> NDArray[np.uint8]:
        owner = self._owner.get(name)
        if owner is None:
            raise ModelFileError(f"{self.path} has no tensor {name!r}")
        return owner.data(name)

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _open_rest(self, count: int) -> None:
        first = self._parts[0]
        if count > MAX_PARTS:
            raise ModelFileError(f"{first.path} is one of {count} parts; at most {MAX_PARTS} are read")
        named = _PART.fullmatch(first.path.name)
        if named is None or int(named["count"]) != count:
            raise ModelFileError(
                f"{first.path} is one of {count} parts; to find the others it must be called "
                f"NAME-00001-of-{count:05}.gguf"
            )
        number = _whole(first, "split.no", 0)
        if number != 0 or int(named["number"]) != 1:
            raise ModelFileError(
                f"{first.path} is part {number + 1} of {count}; open the first, {part_name(named['stem'], 0, count)}"
            )
        for i in range(1, count):
            part = GGUFFile(confined(first.path.parent, part_name(named["stem"], i, count)))
            self._parts.append(part)
            stated = _whole(part, "split.no", -1), _whole(part, "split.count", -1)
            if stated != (i, count):
                raise ModelFileError(f"{part.path} says split.no, split.count = {stated} but must be {(i, count)}")


def _whole(file: GGUFFile, key: str, default: int) -> int:
    value = file.metadata.get(key, default)
    if type(value) is not int or (value < 0 and value != default):
        raise ModelFileError(plain(f"{file.path}: {key} is {str(value)[:80]} but must be a whole number"))
    return value
