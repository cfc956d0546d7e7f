"""Models in several GGUF files: the same model as in one, and every way in which the parts may not fit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.model.gguf_model import GGUFWeights
from octavo.model.open_model import open_weights
from octavo.weights.gguf_file import GGUFFile
from weights.gguf_writer import Typed, random_llama, write_gguf

COUNT = 3


def part(folder: Path, number: int, count: int = COUNT, stem: str = "m") -> Path:
    return folder / f"{stem}-{number + 1:05}-of-{count:05}.gguf"


def split(folder: Path, *, encoding: str = "Q4_1") -> Path:
    """A model in one file ``whole.gguf``, and in three parts ``parts/m-0000N-of-00003.gguf``; the first of these."""
    random_llama(folder / "whole.gguf", encoding=encoding)
    whole = GGUFFile(folder / "whole.gguf")
    (folder / "parts").mkdir()
    names = list(whole.tensors)
    for number in range(COUNT):
        keys: dict[str, object] = dict(written_again(whole)) if number == 0 else {}
        keys |= {"split.no": Typed(2, number), "split.count": Typed(2, COUNT)}
        keys |= {"split.tensors.count": Typed(5, len(names))}
        chosen = names[number::COUNT]
        tensors = {n: (whole.tensors[n].encoding, whole.tensors[n].shape, whole.data(n).tobytes()) for n in chosen}
        write_gguf(part(folder / "parts", number), keys, tensors)
    return part(folder / "parts", 0)


def written_again(file: GGUFFile) -> dict[str, object]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in file.metadata.items()}


def change(path: Path, **keys: object) -> None:
    """Rewrite a part with other ``split.*`` keys, None: without."""
    file = GGUFFile(path)
    metadata = written_again(file) | {f"split.{key}": value for key, value in keys.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tensors = {n: (t.encoding, t.shape, file.data(n).tobytes()) for n, t in file.tensors.items()}
    write_gguf(path, metadata, tensors)


def test_a_split_model_is_the_model_whether_named_by_its_first_part_or_by_its_folder(tmp_path: Path) -> None:
    first = split(tmp_path)
    whole = GGUFWeights(tmp_path / "whole.gguf")
    for path in (first, first.parent):
        source = open_weights(path)
        assert set(source.names()) == set(whole.names())
        assert source.config == whole.config
        for name in whole.names():
            assert np.array_equal(source.tensor(name).data, whole.tensor(name).data), name
        assert source.fingerprint != whole.fingerprint
        source.close()
    with pytest.raises(ModelFileError, match="closed"):
        source.tensor("embedding.weight")


def test_a_later_part_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    split(tmp_path)
    with pytest.raises(ModelFileError, match=r"is part 2 of 3; open the first, m-00001-of-00003\.gguf"):
        GGUFWeights(part(tmp_path / "parts", 1))


def test_parts_that_do_not_fit_are_refused_by_what_is_wrong(tmp_path: Path) -> None:
    first = split(tmp_path)
    folder = first.parent
    kept = tmp_path / "kept"
    shutil.copytree(folder, kept)

    def refused(match: str, path: Path = first) -> None:
        with pytest.raises(ModelFileError, match=match):
            GGUFWeights(path)
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)

    part(folder, 2).unlink()
    refused("cannot open .*m-00003-of-00003")
    part(folder, 2).write_bytes(part(folder, 2).read_bytes()[:-40])
    refused("partial download")
    change(part(folder, 1), no=2)
    refused(r"split.no, split.count = \(2, 3\) but must be \(1, 3\)")
    change(part(folder, 1), count=4)
    refused(r"= \(1, 4\) but must be \(1, 3\)")
    change(part(folder, 1), no=None)
    refused(r"= \(-1, 3\) but must be")
    change(part(folder, 1), no="1")
    refused("split.no is 1 but must be a whole number")
    change(first, **{"tensors.count": 5})
    refused("announces 5 tensors but its parts hold")
    change(first, count=2**31)
    refused("one of 2147483648 parts; at most 256 are read")
    change(first, count=True)
    refused("split.count is True but must be a whole number")
    change(first, count=0)
    refused("called NAME-00001-of-00000.gguf")
    shutil.copy(first, folder / "other.gguf")
    refused("to find the others it must be called NAME-00001-of-00003.gguf", folder / "other.gguf")
    shutil.copy(part(folder, 0), part(folder, 1))
    change(part(folder, 1), no=1)
    refused("tensor .* is in .*00001-of-00003.gguf and in .*00002-of-00003.gguf")
    part(folder, 1).unlink()
    part(folder, 1).symlink_to(part(kept, 1))
    refused("is a link out of its folder")


def test_a_folder_with_parts_of_two_models_must_say_which(tmp_path: Path) -> None:
    first = split(tmp_path)
    shutil.copy(first, part(first.parent, 0, 1, "n"))
    with pytest.raises(ModelFileError, match="holds 4 GGUF files"):
        open_weights(first.parent)
