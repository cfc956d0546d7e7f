"""The front door to weights: open whatever a path holds, and insist that it is the whole model and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from octavo.core.errors import ModelFileError
from octavo.model.gguf_model import GGUFWeights
from octavo.model.hf_model import HFFolderWeights
from octavo.model.weight_source import WeightSource
from octavo.weights.gguf_file import MAGIC
from octavo.weights.gguf_split import is_one_model
from octavo.weights.messages import plain

_SHOWN_PROBLEMS = 8
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_weights(path: str | os.PathLike[str]) -> WeightSource:
    """Open a model by what it is, not by what it is called.

    A GGUF file; a folder with config.json and safetensors; a .safetensors file in such a folder; or a folder that holds
    nothing but one GGUF model, in one file or several parts. Raises ``ModelFileError`` for anything else.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(f"there is no file or folder {path}")
    if path.suffix == ".safetensors":
        return HFFolderWeights(path.parent, only_file=path.name)
    if path.suffix in _PICKLES and not _is_gguf(path):
        raise ModelFileError(f"{path} is a pickle, which can run code when opened; use safetensors or GGUF")
    return GGUFWeights(path)


def _open_folder(folder: Path) -> WeightSource:
    if (folder / "config.json").exists():
        return HFFolderWeights(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1 or (ggufs and is_one_model(ggufs)):
        return GGUFWeights(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs[:_SHOWN_PROBLEMS])
        raise ModelFileError(f"{folder} holds {len(ggufs)} GGUF files ({names}); name one of them")
    raise ModelFileError(f"{folder} holds neither a config.json nor a .gguf file")


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def check_complete(source: WeightSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ModelFileError`` unless ``source`` has exactly the tensors and shapes that the model needs.

    expected: canonical name -> shape, row-major

    Tensors that carry no weights (rotary frequencies, a second copy of a tied head) never get here: the readers know
    them by name and say why they may be left out.
    """
    present = set(source.names())
    problems = [f"{name} {shape} is missing" for name, shape in expected.items() if name not in present]
    problems += [f"{name} is not part of this model" for name in sorted(present - expected.keys())]
    for name, shape in expected.items():
        if name in present and (found := source.shape(name)) != shape:
            problems.append(f"{name} is {found} but must be {shape}")
    if problems:
        rest = len(problems) - _SHOWN_PROBLEMS
        listed = "; ".join(plain(problem, 200) for problem in problems[:_SHOWN_PROBLEMS]) + (
            f"; and {rest} more" if rest > 0 else ""
        )
        raise ModelFileError(f"the weights do not fit the {source.config.architecture} architecture: {listed}")
