"""The folder where fetched models live: where it is, what it holds, and how to take something out.

<root>/packages/<file>.gguf              models that come inside a Python package
<root>/hub/<org>--<name>/<commit>/       models from a hub: one folder per commit
<root>/hub/<org>--<name>/refs/<name>     the commit that a branch or tag stood for; written last, so it means complete
<root>/hub/<org>--<name>/partial/        files that are not whole yet, by their hash: a later fetch goes on there
<root>/partial/                          packages on their way; what a killed process left is swept by the next
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import DownloadError, ModelFileError

_POLL_S = 0.2


def cache_root() -> Path:
    """``OCTAVO_CACHE``, or the platform's folder for caches. The folder need not exist."""
    given = os.environ.get("OCTAVO_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and Path(xdg).is_absolute():  # the XDG specification says that relative ones are to be ignored
        return Path(xdg) / "octavo"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "octavo" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "octavo"
    return Path.home() / ".cache" / "octavo"


def package_folder() -> Path:
    """Where models out of Python packages are kept."""
    return cache_root() / "packages"


def hub_folder() -> Path:
    """Where models from hubs are kept."""
    return cache_root() / "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One model in the cache."""

    name: str  # what resolve_model() takes: a file's name without .gguf, or a hub id
    path: Path  # file or folder to delete
    num_bytes: int
    source: str  # "package" | "hub"


def cached_models() -> list[CachedModel]:
    """What the cache holds, by name. Links are not followed: nothing outside the cache folder is looked at."""
    models = [
        CachedModel(name=file.stem, path=file, num_bytes=file.lstat().st_size, source="package")
        for file in _entries(package_folder())
        if file.suffix == ".gguf" and file.is_file() and not file.is_symlink()
    ]
    for folder in _entries(hub_folder()):
        org, separator, name = folder.name.partition("--")
        if not separator or not folder.is_dir() or folder.is_symlink():
            continue
        if num_bytes := _size(folder):  # a failed fetch may leave empty folders
            models.append(CachedModel(name=f"{org}/{name}", path=folder, num_bytes=num_bytes, source="hub"))
    return sorted(models, key=lambda model: model.name)


def remove_cached(model: CachedModel) -> int:
    """Delete a model that ``cached_models`` returned; returns the bytes freed. A process that has it mapped goes on."""
    root = cache_root().resolve()
    if root not in model.path.resolve().parents:
        raise ModelFileError(f"{model.path} is outside the model cache {root}; delete it by hand")
    try:
        if model.path.is_dir():
            shutil.rmtree(model.path)  # does not follow links
        else:
            model.path.unlink()
    except OSError as error:
        raise ModelFileError(f"cannot delete {model.path}: {error.strerror or error}") from None
    return model.num_bytes


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; a file with several hard links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(parent, name))
            sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make ``folder`` and let one process at a time work in it. The lock goes when its holder dies, however it dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = folder.with_name(folder.name + ".lock").open("ab")
    except OSError as error:
        raise DownloadError(
            f"cannot write to the model cache {cache_root()}: {error.strerror or error}; "
            "set OCTAVO_CACHE to a folder that can be written"
        ) from None
    with lock:
        if not _try_lock(lock.fileno()):
            print("another process is fetching a model; waiting for it", file=sys.stderr, flush=True)
            while not _try_lock(lock.fileno()):
                time.sleep(_POLL_S)
        yield


@contextmanager
def package_workspace() -> Iterator[Path]:
    """An empty folder for the partial files of one package, gone afterwards; one process at a time has it."""
    folder = cache_root() / "partial"
    with locked(folder):
        _empty(folder)  # left over from a killed process: a living one would hold the lock
        try:
            yield Path(tempfile.mkdtemp(dir=folder))  # its own: an orphaned installer may still write beside it
        finally:
            _empty(folder)


def _empty(folder: Path) -> None:
    for entry in _entries(folder):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


if sys.platform == "win32":
    import msvcrt

    def _try_lock(descriptor: int) -> bool:
        os.lseek(descriptor, 0, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
