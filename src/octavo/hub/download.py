"""Models from a Hugging Face hub: the few files that are needed, resumable, checked against the hub's own hashes.

``huggingface_hub`` supplies addresses, tokens, endpoints, retries and progress bars. The files are kept by octavo's own
cache, because a download that was interrupted is to go on where it stopped, also in the next process, and because a
file is not believed until its hash is right.

Environment: ``HF_TOKEN`` (or a stored login), ``HF_ENDPOINT``, ``HF_HUB_OFFLINE``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from octavo.core.errors import DownloadError, ModelFileError
from octavo.hub.cache import hub_folder, locked
from octavo.weights.hf_files import CONFIG, INDEX, SINGLE, shards_of
from octavo.weights.mapped_file import read_small
from octavo.weights.strict_json import MAX_JSON_BYTES, parse_object

#: Files beside the weights, where a repository has them.
_SMALL_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"[\w.-]{1,200}(/[\w.-]{1,200}){0,4}", re.ASCII)
_SAFE_SEGMENT = re.compile(r"[\w .+=@-]{1,200}", re.ASCII)
_SPLIT_GGUF = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.ASCII)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What is wanted of a hub."""

    repo: str  # "org/name"
    part: str | None  # a GGUF file of the repository, or a quantisation that names one
    revision: str  # branch, tag or commit

    @property
    def folder(self) -> Path:
        """Where the cache keeps the repository."""
        return hub_folder() / self.repo.replace("/", "--")

    @property
    def ref(self) -> Path:
        """The file that holds the commit of a branch or tag."""
        return self.folder / "refs" / self.revision.replace("/", "--")

    def check(self) -> None:
        """Refuse names that could be taken for paths out of the cache."""
        if ".." in self.repo or "--" in self.repo or self.repo.startswith((".", "-")) or "/." in self.repo:
            raise ModelFileError(f"{self.repo!r} is not a possible hub id")
        if not _REVISION.fullmatch(self.revision) or ".." in self.revision:
            raise ModelFileError(f"{self.revision!r} is not a possible revision")
        if self.part is not None and not _is_safe(self.part):
            raise ModelFileError(f"{self.part!r} is not a possible file or quantisation of {self.repo}")


def _is_safe(name: str) -> bool:
    """A relative path of plain segments: nothing that leads elsewhere on any platform."""
    return all(_SAFE_SEGMENT.fullmatch(segment) and segment.strip(". ") for segment in name.split("/"))


def fetch_hub_model(wanted: HubModel, *, progress: bool, offline: bool, refresh: bool) -> Path:
    """A folder with config.json and safetensors, or a .gguf file; fetched first if the cache does not hold it.

    Several processes at once: one fetches, the others wait. Raises ``DownloadError`` or ``ModelFileError``.
    """
    wanted.check()
    if (offline or not refresh) and (held := _cached(wanted)) is not None:
        return held
    if offline:
        raise DownloadError(f"{wanted.repo} is not in the cache and octavo is offline; run 'octavo pull' online first")
    with locked(wanted.folder):
        if not refresh and (held := _cached(wanted)) is not None:  # another process was faster
            return held
        try:
            return _fetch(wanted, progress)
        except OSError as error:
            raise DownloadError(f"cannot store {wanted.repo} in {wanted.folder}: {error.strerror or error}") from None


def _cached(wanted: HubModel) -> Path | None:
    """The model as the cache holds it, complete, without asking the hub."""
    commit = wanted.revision
    if not _COMMIT.fullmatch(commit):
        if not wanted.ref.is_file():
            return None
        commit = wanted.ref.read_text(errors="replace").strip()
    folder = wanted.folder / commit
    if not _COMMIT.fullmatch(commit) or not folder.is_dir():
        return None
    present = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    try:
        gguf = _choose_gguf(wanted, present)
    except ModelFileError:
        return None
    if gguf is not None:
        return folder / gguf
    if CONFIG not in present:
        return None
    if SINGLE in present:
        return folder
    complete = INDEX in present and set(_shards(folder)) <= set(present)
    return folder if complete else None


def _choose_gguf(wanted: HubModel, files: Sequence[str]) -> str | None:
    """The GGUF file that is meant; None if the repository's safetensors are."""
    ggufs = [name for name in files if name.endswith(".gguf") and not _SPLIT_GGUF.search(name)]
    part = wanted.part
    if part is None:
        if SINGLE in files or INDEX in files:
            return None
        candidates = ggufs
    elif part in ggufs:
        return part
    else:
        # "Q4_0" means model-Q4_0.gguf and model.Q4_0.gguf, not model-Q4_0_4_4.gguf
        word = re.compile(rf"(^|[-./]){re.escape(part)}\.gguf$", re.IGNORECASE)
        candidates = [name for name in ggufs if word.search(name)]
    if len(candidates) == 1:
        return candidates[0]
    if ggufs:
        listed = ", ".join(sorted(ggufs)[:12]) + (", ..." if len(ggufs) > 12 else "")
        raise ModelFileError(
            f"{wanted.repo} has {len(candidates)} GGUF files that fit {part or 'no further name'}; "
            f"write {wanted.repo}:FILE with one of {listed}"
        )
    if part is not None:
        raise ModelFileError(f"{wanted.repo} has no GGUF files, so {part!r} means nothing; leave it out")
    if any(name.endswith(_PICKLES) for name in files):
        raise ModelFileError(
            f"{wanted.repo} has its weights only as pickles, which can run code when opened, so octavo never reads "
            "them; look for a repository with safetensors or GGUF"
        )
    raise ModelFileError(f"{wanted.repo} has neither safetensors nor GGUF files at {wanted.revision}")


def _shards(folder: Path) -> list[str]:
    where = folder / INDEX
    return sorted(set(shards_of(parse_object(read_small(where, MAX_JSON_BYTES), str(where)), str(where)).values()))


def _fetch(wanted: HubModel, progress: bool) -> Path:
    with _hub_errors(wanted):
        from huggingface_hub import HfApi  # half a second to import: only to download

        endpoint = os.environ.get("HF_ENDPOINT") or None
        info = HfApi(endpoint=endpoint).model_info(wanted.repo, revision=wanted.revision)
    commit = info.sha
    if commit is None or not _COMMIT.fullmatch(commit):
        raise DownloadError(f"the hub gave {commit!r} as the commit of {wanted.repo}, which is not one")
    files = [sibling.rfilename for sibling in info.siblings or ()]
    gguf = _choose_gguf(wanted, files)
    folder = wanted.folder / commit
    fetcher = _Fetcher(wanted, commit, endpoint, progress)
    if gguf is not None:
        fetcher.fetch(gguf)
    else:
        # weights last: a folder that has them has everything
        for name in (*_SMALL_FILES, *(() if SINGLE in files else (INDEX,))):
            if name in files:
                fetcher.fetch(name)
        for name in [SINGLE] if SINGLE in files else _shards(folder):
            if name not in files:
                raise ModelFileError(f"{wanted.repo}: {INDEX} names {name!r}, which the repository does not have")
            fetcher.fetch(name)
    wanted.ref.parent.mkdir(exist_ok=True)
    fresh = wanted.ref.with_name(wanted.ref.name + ".new")
    fresh.write_text(commit)
    os.replace(fresh, wanted.ref)
    _drop_unreferenced(wanted.folder)
    return folder / gguf if gguf is not None else folder


def _drop_unreferenced(folder: Path) -> None:
    """Delete the commits that a branch has moved away from. Running servers keep what they have mapped."""
    kept = {ref.read_text(errors="replace").strip() for ref in (folder / "refs").iterdir()}
    for entry in folder.iterdir():
        if _COMMIT.fullmatch(entry.name) and entry.name not in kept:
            shutil.rmtree(entry, ignore_errors=True)


class _Fetcher:
    """Brings single files of one commit into the cache."""

    def __init__(self, wanted: HubModel, commit: str, endpoint: str | None, progress: bool) -> None:
        self._wanted, self._commit, self._endpoint, self._progress = wanted, commit, endpoint, progress
        self._folder = wanted.folder / commit

    def fetch(self, name: str) -> None:
        """One file, whole and checked, under its name. Nothing happens if it is there."""
        if not _is_safe(name):
            raise ModelFileError(f"{self._wanted.repo} has a file {name!r}, which is not a name octavo writes to disk")
        target = self._folder / name
        if target.exists():
            return
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self._wanted.repo, name, revision=self._commit, endpoint=self._endpoint)
        with _hub_errors(self._wanted):
            found = get_hf_file_metadata(url)
        etag = found.etag or ""
        if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", etag):
            raise DownloadError(f"the hub gives no hash for {name} of {self._wanted.repo}, so it could not be checked")
        partial = self._wanted.folder / "partial" / etag
        for folder in (target.parent, partial.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if self._reuse(name, etag, partial, target):
            return
        self._download(url, name, partial, found.size)
        if _hub_hash(partial, etag) != etag:
            partial.unlink()
            raise DownloadError(f"{name} of {self._wanted.repo} arrived damaged: its hash is not {etag}; try again")
        os.replace(partial, target)

    def _reuse(self, name: str, etag: str, partial: Path, target: Path) -> bool:
        """Link the same file from another commit: a new README must not cost a download of the weights."""
        for other in self._wanted.folder.iterdir():
            path = other / name
            if not _COMMIT.fullmatch(other.name) or not path.is_file() or _hub_hash(path, etag) != etag:
                continue
            try:
                os.link(path, target)
            except OSError:  # a file system without hard links
                shutil.copyfile(path, partial)
                os.replace(partial, target)
            return True
        return False

    def _download(self, url: str, name: str, partial: Path, size: int | None) -> None:
        """Append to ``partial`` what it lacks. size: of the whole file, where the hub says it."""
        from huggingface_hub import get_token
        from huggingface_hub.file_download import http_get

        token = get_token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        attempts_left = _ATTEMPTS
        megabytes = "" if size is None else f" ({size / 1e6:.1f} MB)"
        with _bars(self._progress, f"fetching {name} of {self._wanted.repo}{megabytes}"):
            while True:
                have = partial.stat().st_size if partial.exists() else 0
                if size is not None and have > size:
                    partial.unlink()
                    have = 0
                try:
                    with partial.open("ab") as file, _hub_errors(self._wanted):
                        http_get(url, file, resume_size=have, headers=headers, expected_size=size)
                        return
                except DownloadError:
                    attempts_left -= 1
                    if attempts_left <= 0 or partial.stat().st_size <= have:
                        raise  # no byte further: more of the same will not help


def _hub_hash(path: Path, etag: str) -> str:
    """The hash by which the hub knows a file: sha256 for large ones, git's blob hash (sha1) for small ones."""
    if len(etag) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def _bars(shown: bool, line: str) -> Iterator[None]:
    """The hub library's progress bars on a terminal; elsewhere one line; or nothing."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown and sys.stderr.isatty():
        yield
        return
    if shown:
        print(line, file=sys.stderr, flush=True)
    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _hub_errors(wanted: HubModel) -> Iterator[None]:
    """Turn what the hub library raises into ``DownloadError`` with the way out."""
    try:
        yield
    except DownloadError:
        raise
    except Exception as error:  # its transport errors are those of whichever HTTP library its version uses
        raise DownloadError(_explain(wanted, error)) from error


def _explain(wanted: HubModel, error: Exception) -> str:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if isinstance(error, GatedRepoError):  # first: it is a RepositoryNotFoundError too
        return f"{wanted.repo} is gated; ask for access at {where}/{wanted.repo}, then set HF_TOKEN to your token"
    if isinstance(error, RevisionNotFoundError):
        return f"{wanted.repo} has no revision {wanted.revision!r}"
    if isinstance(error, EntryNotFoundError):
        return f"{wanted.repo} lost a file while it was being fetched; try again"
    if isinstance(error, RepositoryNotFoundError):
        return f"{where} has no model {wanted.repo}, or it is private and HF_TOKEN does not open it"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
    return (
        f"cannot fetch {wanted.repo} from {where}: {first_line}; "
        "check the network and try again: what has arrived is kept"
    )
