"""A model folder as Hugging Face lays it out: config.json and safetensors, in one file or in shards with an index."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np

from octavo.core.errors import ModelFileError
from octavo.kernels.weight_tensor import Encoding, WeightTensor
from octavo.model.weights.base import WeightSource
from octavo.model.weights.hf_config import read_hf_config
from octavo.model.weights.mapped_file import confined, read_small
from octavo.model.weights.safetensors import SafetensorsEntry, SafetensorsFile
from octavo.model.weights.strict_json import MAX_JSON_BYTES, parse_object

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 1024

_TOP_LEVEL = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
}
_IN_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,4})\.([a-z_.]+)\.(weight|bias)")
# Old checkpoints carry the rotary frequencies; they follow from rope_theta, which is what octavo uses.
_ROTARY_BUFFER = re.compile(r"model\.(layers\.[0-9]{1,5}\.self_attn\.)?rotary_emb\.inv_freq")


class HFFolderWeights(WeightSource):
    """config.json and its safetensors. All tensors are views of memory maps.

    folder:    as given; file names inside it are confined to it (see ``mapped_file.confined``)
    only_file: read this .safetensors file instead of model.safetensors or the index
    """

    def __init__(self, folder: Path, only_file: str | None = None) -> None:
        self.folder = folder
        config_bytes = read_small(confined(folder, CONFIG), MAX_JSON_BYTES)
        self.config = read_hf_config(
            parse_object(config_bytes, str(folder / CONFIG)), str(folder / CONFIG), folder.name
        )
        digest = sha256(config_bytes)
        self._where: dict[str, tuple[SafetensorsFile, SafetensorsEntry]] = {}
        self._files: list[SafetensorsFile] = []
        try:
            placed = {} if only_file else _read_index(folder)
            for name in [only_file] if only_file else sorted(set(placed.values())) or [SINGLE]:
                file = SafetensorsFile(confined(folder, name))
                self._files.append(file)
                self._take(file, [key for key, shard in placed.items() if shard == name])
                digest.update(f"{name} {file.fingerprint} ".encode())
            self._drop_copy_of_tied_head()
        except BaseException:
            self.close()
            raise
        self.fingerprint = digest.hexdigest()[:16]

    def names(self) -> Iterable[str]:
        return self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1].shape

    def encoding(self, name: str) -> Encoding:
        return self._find(name)[1].encoding

    def tensor(self, name: str) -> WeightTensor:
        file, entry = self._find(name)
        return WeightTensor(name=name, shape=entry.shape, encoding=entry.encoding, data=file.data(entry.name))

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
            if _ROTARY_BUFFER.fullmatch(entry.name):
                continue
            name = canonical_name(entry.name)
            if name in self._where:
                other = self._where[name][0].path.name
                raise ModelFileError(f"{self.folder}: tensor {name!r} is both in {other} and in {file.path.name}")
            self._where[name] = (file, entry)

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


def canonical_name(file_name: str) -> str:
    """Hugging Face's tensor name -> canonical name; a name without a counterpart is given as it is."""
    if file_name in _TOP_LEVEL:
        return _TOP_LEVEL[file_name]
    match = _LAYER_NAME.fullmatch(file_name)
    if match is None or match[2] not in _IN_LAYER:
        return file_name
    return f"layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> shard, from the index; empty if the weights are in one file."""
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        raise ModelFileError(f"{folder} holds neither {SINGLE} nor {INDEX}; pickles (.bin) are never read")
    where = folder / INDEX
    return shards_of(parse_object(read_small(confined(folder, INDEX), MAX_JSON_BYTES), str(where)), str(where))


def shards_of(index: dict[str, object], where: str) -> dict[str, str]:
    """Tensor name -> shard file, of a parsed index."""
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(shard, str) for shard in placed.values()):
        raise ModelFileError(f"{where}: weight_map must be an object of tensor names and file names")
    shards = set(placed.values())
    if len(shards) > MAX_SHARDS:
        raise ModelFileError(f"{where} names {len(shards)} files; at most {MAX_SHARDS} are read")
    if odd := [shard for shard in shards if not shard.endswith(".safetensors")]:
        raise ModelFileError(f"{where} names {odd[0]!r}, which is not a safetensors file")
    return placed
