"""Memory-mapping a file that may be anything: a pipe, empty, unreadable, or a link out of the folder it lies in."""

from __future__ import annotations

import mmap
import stat
from pathlib import Path

from octavo.core.errors import ModelFileError


def map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only. ``ModelFileError`` if it is not a regular file with at least one byte.

    The mapping lives as long as any array that looks into it: dropping the object never pulls memory from under one.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block for ever
            raise ModelFileError(f"{path} is not a regular file")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped; a name with a NUL cannot exist
        raise ModelFileError(f"{path} is empty or not a file") from None
    except OSError as error:
        raise ModelFileError(f"cannot open {path}: {error.strerror or error}") from None


def read_small(path: Path, limit: int) -> bytes:
    """All bytes of a regular file of at most ``limit`` bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path} is not a regular file")
        if status.st_size > limit:
            raise ModelFileError(f"{path} has {status.st_size} bytes; at most {limit} are read")
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise ModelFileError(f"cannot open {path}: {error.strerror or error}") from None


def confined(folder: Path, name: str) -> Path:
    """``folder / name``, for a ``name`` that a file or a server supplied. It must be a plain file name.

    A link is followed only to another file of the folder, or, in the cache layout of ``huggingface_hub``
    (``<repo>/snapshots/<commit>/name -> ../../blobs/<hash>``), to that repository's blobs. So neither a name in an
    index nor a link that came with a downloaded folder can make octavo read what was not meant.
    """
    if name in ("", ".", "..") or any(c in name for c in "/\\:\0"):
        raise ModelFileError(f"{folder} refers to {name!r}, which is not a plain file name inside that folder")
    path = folder / name
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        raise ModelFileError(f"cannot follow {path}: {error}") from None
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if target.parent not in allowed:
        raise ModelFileError(f"{path} is a link out of its folder, to {target}; copy the file, or give the real folder")
    return path
