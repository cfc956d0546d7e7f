"""A model folder as Hugging Face lays it out: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import cast

import numpy as np

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.model.hf_fields import HFFields
from octavo.model.registry import ARCHITECTURES, find_architecture, known_architectures
from octavo.model.tensor_pieces import Piece, pieces_of
from octavo.model.weight_source import WeightSource
from octavo.weights.dequantise import Encoding, dequantise
from octavo.weights.hf_files import CONFIG, INDEX, SINGLE, read_index
from octavo.weights.mapped_file import confined, read_small
from octavo.weights.safetensors import SafetensorsEntry, SafetensorsFile
from octavo.weights.strict_json import MAX_JSON_BYTES, parse_object
from octavo.weights.tensor import WeightTensor

# Old checkpoints carry the rotary frequencies and masks; they follow from the config, which is what octavo uses.
_BUFFER = re.compile(
    r"model\.(layers\.[0-9]{1,5}\.self_attn\.)?rotary_emb\.inv_freq"
    r"|gpt_neox\.layers\.[0-9]{1,5}\.attention\.(rotary_emb\.inv_freq|bias|masked_bias)"
)


#: model_type of a model that reads images too -> that of its text part, if it does not say so.
WRAPPERS = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_TEXT_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_IMAGE_PREFIXES = tuple(
    prefix + part for prefix in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.")
)

logger = logging.getLogger(__name__)


class HFFolderWeights(WeightSource):
    """config.json and its safetensors. All tensors are views of memory maps.

    folder:    as given; file names inside it are confined to it (see ``mapped_file.confined``)
    only_file: read this .safetensors file instead of model.safetensors or the index
    """

    def __init__(self, folder: Path, only_file: str | None = None) -> None:
        self.folder = folder
        config_bytes = read_small(confined(folder, CONFIG), MAX_JSON_BYTES)
        where = str(folder / CONFIG)
        fields = parse_object(config_bytes, where)
        self.config, self._wrapped = read_hf_config(fields, where, folder.name), is_wrapper(fields)
        self._architecture = find_architecture(self.config.architecture)
        self._pieces: dict[str, Piece] = {}
        digest = sha256(config_bytes)
        self._where: dict[str, tuple[SafetensorsFile, SafetensorsEntry]] = {}
        self._num_left_out = 0
        self._files: list[SafetensorsFile] = []
        try:
            placed = {} if only_file else read_index(folder)
            for name in [only_file] if only_file else sorted(set(placed.values())) or [SINGLE]:
                file = SafetensorsFile(confined(folder, name))
                self._files.append(file)
                self._take(file, [key for key, shard in placed.items() if shard == name])
                digest.update(f"{name} {file.fingerprint} ".encode())
            self._drop_copy_of_tied_head()
            if self._num_left_out:
                logger.warning(
                    "%s: %d tensors that read images are left out; only text is served", folder, self._num_left_out
                )
        except BaseException:
            self.close()
            raise
        self.fingerprint = digest.hexdigest()[:16]

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._pieces[name].shape_of(self._find(name)[1].shape)

    def encoding(self, name: str) -> Encoding:
        return "F32" if self._adds_one(name) else self._find(name)[1].encoding

    def tensor(self, name: str) -> WeightTensor:
        file, entry = self._find(name)
        data, encoding = self._pieces[name].data_of(file.data(entry.name), entry.shape[0]), entry.encoding
        if self._adds_one(name):
            data, encoding = (dequantise(data, encoding, self.shape(name)) + 1.0).astype("<f4").view(np.uint8), "F32"
        return WeightTensor(name=name, shape=self.shape(name), encoding=encoding, data=data)

    def _adds_one(self, name: str) -> bool:
        """Whether the file's numbers are gains of a norm, less 1."""
        return self._architecture.unit_offset and name.endswith("norm.weight")

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _find(self, name: str) -> tuple[SafetensorsFile, SafetensorsEntry]:
        if name not in self._where:
            raise ModelFileError(f"{self.folder} has no tensor {name!r}")
        return self._where[name]

    def _take(self, file: SafetensorsFile, indexed: list[str]) -> None:
        """Add a file's tensors. indexed: those that the index says are in it, if there is an index."""
        if missing := [name for name in indexed if name not in file.tensors]:
            raise ModelFileError(f"{INDEX} says that {missing[0]!r} is in {file.path}, but it is not")
        for entry in file.tensors.values():
            if _BUFFER.fullmatch(entry.name):
                continue
            file_name = _text_name(entry.name) if self._wrapped else entry.name
            if file_name is None:
                self._num_left_out += 1
                continue
            whole = self._architecture.names.from_hf(file_name)
            for piece in pieces_of(self._architecture, self.config, whole, entry.shape, "hf"):
                name = piece.name
                if name in self._where:
                    other = self._where[name][0].path.name
                    raise ModelFileError(f"{self.folder}: tensor {name!r} is both in {other} and in {file.path.name}")
                self._where[name], self._pieces[name] = (file, entry), piece

    def _drop_copy_of_tied_head(self) -> None:
        """Some writers store a tied head a second time. Equal bytes are left out; others contradict the config."""
        if not self.config.tied_embeddings or "head.weight" not in self._where or "embedding.weight" not in self._where:
            return
        if not np.array_equal(self.tensor("head.weight").data, self.tensor("embedding.weight").data):
            raise ModelFileError(
                f"{self.folder}: lm_head.weight differs from model.embed_tokens.weight but config.json has "
                "tie_word_embeddings on"
            )
        del self._where["head.weight"]


def is_wrapper(fields: Mapping[str, object]) -> bool:
    """Whether a config.json describes a text model among other things, which read images."""
    return fields.get("model_type") in WRAPPERS and isinstance(fields.get("text_config"), dict)


def _text_part(fields: Mapping[str, object]) -> dict[str, object]:
    """The text model's own fields, and those of the whole that concern it."""
    text = cast(dict[str, object], fields["text_config"])
    kind = {"model_type": WRAPPERS[str(fields["model_type"])]}
    whole = {key: fields[key] for key in ("quantization_config", "auto_map", "tie_word_embeddings") if key in fields}
    return {**kind, **text, **whole}


def _text_name(file_name: str) -> str | None:
    """A tensor's name in a file of the text model alone; None for one that reads images."""
    for prefix, alone in _TEXT_PREFIXES.items():
        if file_name.startswith(prefix):
            return alone + file_name.removeprefix(prefix)
    return None if file_name.startswith(_IMAGE_PREFIXES) else file_name


def read_hf_config(fields: dict[str, object], where: str, name: str) -> ModelConfig:
    """The shape that a parsed config.json describes. where: its path, for messages; name: what to call the model."""
    if is_wrapper(fields):
        fields, where = _text_part(fields), f"{where}, text_config"
    values = HFFields(fields, where, name)
    if values.model_type not in ARCHITECTURES:
        values.fail(f"model_type is {values.model_type!r}; supported are {known_architectures()}")
    return find_architecture(values.model_type).from_hf(values)
