"""A model folder as Hugging Face lays it out: the names of its files, and the index of its shards."""

from __future__ import annotations

from pathlib import Path

from octavo.core.errors import ModelFileError
from octavo.weights.mapped_file import confined, read_small
from octavo.weights.strict_json import MAX_JSON_BYTES, parse_object

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARDS = 1024


def read_index(folder: Path) -> dict[str, str]:
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
