"""``octavo convert``: a model as one GGUF file, its wide matrices packed if that is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.core.config import QuantizeFormat
from octavo.core.errors import ModelFileError
from octavo.model.gguf_model import FILE_TYPES, GGUFWeights, write_model
from octavo.model.open_model import open_weights
from octavo.model.quantised import QuantisedWeights, encoding_of, format_for, quantised_rows
from octavo.weights.dequantise import Encoding
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_split import open_gguf
from octavo.weights.gguf_writer import write_gguf
from octavo.weights.tensor import WeightTensor

_HEADS = ("output.weight", "token_embd.weight")  # the first that a file has is the matrix of the logits


def convert(source: Path, out: Path, wanted: QuantizeFormat | None, vocabulary: Path | None = None) -> int:
    """Write ``source`` (whatever ``open_weights`` opens) to ``out``; returns its size in bytes.

    GGUF keeps its metadata and its names, also those of an architecture that octavo does not run. A folder of
    safetensors takes its tokenizer from the GGUF ``vocabulary``. What is there at ``out`` is replaced once all is
    written. Raises ``ModelFileError``.
    """
    partial = out.with_name(out.name + ".partial")
    try:
        if source.is_dir() and (source / "config.json").exists():
            _convert_folder(source, partial, wanted, vocabulary)
        else:
            _convert_gguf(_gguf_path(source), partial, wanted)
        size = partial.stat().st_size
        os.replace(partial, out)
    except OSError as error:
        raise ModelFileError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return size


def _gguf_path(source: Path) -> Path:
    if not source.is_dir():
        return source
    opened = open_weights(source)  # knows what a folder must hold
    assert isinstance(opened, GGUFWeights)
    opened.close()
    return opened.file.path


def _convert_gguf(source: Path, out: Path, wanted: QuantizeFormat | None) -> None:
    file = open_gguf(source)
    head = next((name for name in _HEADS if name in file.tensors), None)
    infos: dict[str, tuple[Encoding, tuple[int, ...]]] = {}
    for name, tensor in file.tensors.items():
        encoding = tensor.encoding
        if wanted is not None and name.endswith(".weight"):
            encoding = format_for(encoding_of(wanted), encoding, tensor.shape, is_head=name == head)
        infos[name] = encoding, tensor.shape
    metadata = {key: value for key, value in file.metadata.items() if not key.startswith("split.")}
    if wanted is not None:
        metadata["general.file_type"] = FILE_TYPES[encoding_of(wanted)]
        metadata["general.quantization_version"] = 2
    write_gguf(out, metadata, infos, _data(file, infos))
    file.close()


def _data(file: GGUFFile, infos: Mapping[str, tuple[Encoding, tuple[int, ...]]]) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each tensor in its new encoding."""
    for name, (encoding, shape) in infos.items():
        stored = file.tensors[name].encoding
        data = file.data(name)
        if encoding == stored:
            yield data
        else:
            yield quantised_rows(WeightTensor(name=name, shape=shape, encoding=stored, data=data), encoding)


def _convert_folder(source: Path, out: Path, wanted: QuantizeFormat | None, vocabulary: Path | None) -> None:
    if vocabulary is None:
        raise ModelFileError(
            f"{source} has no GGUF vocabulary; name a GGUF file of the same tokenizer with --vocabulary"
        )
    weights = open_weights(source)
    lender = open_gguf(vocabulary)
    tokenizer = {key: value for key, value in lender.metadata.items() if key.startswith("tokenizer.")}
    tokens = tokenizer.get("tokenizer.ggml.tokens", ())
    if not isinstance(tokens, tuple) or len(tokens) != weights.config.vocab_size:
        raise ModelFileError(
            f"{vocabulary} has {len(tokens) if isinstance(tokens, tuple) else 0} tokens but the model "
            f"{weights.config.vocab_size}"
        )
    write_model(out, QuantisedWeights(weights, wanted) if wanted is not None else weights, tokenizer)
    lender.close()
    weights.close()
