"""What every benchmark writes beside its samples: the machine, the versions, the exact command."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.cli.console import remark
from octavo.cli.host import package_version, probe_host
from octavo.core.config import ResolvedConfig
from octavo.core.errors import ConfigError

_PACKAGES = ("octavo", "torch", "transformers", "numpy", "tokenizers")


def host_facts() -> dict[str, Any]:
    """CPU, cores, memory, load, versions, source revision, command and time: what a figure means nothing without."""
    return {
        **dataclasses.asdict(probe_host()),
        "python": sys.version,
        "versions": {name: package_version(name) for name in _PACKAGES},
        "revision": _revision(),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def config_facts(config: ResolvedConfig) -> dict[str, Any]:
    """What ran: the part of a resolved config that decides speed."""
    return {
        "model": config.model_name,
        "path": config.model_path,
        "backend": config.backend,
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype,
        "numerics": config.wish.numerics,
        "threads": config.threads,
        "weights_bytes": config.weights_bytes,
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.wish.max_num_batched_tokens,
        "step_mode": config.wish.step_mode,
        "fingerprint": config.system_fingerprint,
    }


def save(path: Path, payload: dict[str, Any]) -> None:
    """Write a result as JSON, replacing an older one. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(payload, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}; the samples are lost") from error
    remark(f"samples: {path}")


def _revision() -> str | None:
    """The commit of this source tree, "+changes" behind it where files differ; None outside a git checkout."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None  # no checkout, or an installation inside somebody else's
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None
