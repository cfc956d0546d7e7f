"""``octavo doctor``: what was found, what will be used, how fast it could be, and whether the tokens are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from octavo.cli.console import human_bytes
from octavo.cli.flags import with_config
from octavo.cli.tables import facts_table, show, show_line
from octavo.core.config import EngineConfig
from octavo.core.errors import DownloadError, OctavoError

if TYPE_CHECKING:
    from octavo.cli.host import Host
    from octavo.engine.engine import Engine

Level = Literal["PASS", "NOTE", "FAIL"]
_STYLES: dict[Level, str] = {"PASS": "green", "NOTE": "yellow", "FAIL": "bold red"}
_LITTLE_MEMORY = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the diagnosis. A FAIL says what to do about it."""

    level: Level
    text: str


@with_config()
def doctor(engine: EngineConfig) -> None:
    """Say what was found on this machine and what will be used, and check that the model writes the right tokens."""
    from octavo.cli.host import package_version, probe_host

    host = probe_host()
    torch_version = package_version("torch")
    has_native = find_spec("octavo.kernels.native") is not None
    rows = [*host_rows(host), ("torch", torch_version or "not installed")]
    rows += [("native kernels", "installed" if has_native else "not installed")]
    show(facts_table("Found", rows))
    failed = False
    for finding in _diagnose(engine, host, has_backend=has_native or torch_version is not None):
        show_line(finding.level, finding.text, style=_STYLES[finding.level])
        failed = failed or finding.level == "FAIL"
    raise typer.Exit(1 if failed else 0)


def host_rows(host: Host) -> list[tuple[str, str]]:
    """The machine, for a table."""
    total = f" of {human_bytes(host.total_bytes)}" if host.total_bytes else ""
    load = "" if host.load_1min is None else f"; load {host.load_1min:.1f}"
    return [
        ("CPU", host.cpu),
        ("instructions", " ".join(host.isa) or "none that matter here"),
        ("cores", f"{host.cores} for this process, {host.machine_cores} in the machine{load}"),
        ("memory", f"{human_bytes(host.free_bytes)} free for this process{total}"),
        ("system", host.system),
        ("Python", host.python),
    ]


def machine_findings(host: Host, *, has_backend: bool) -> Iterator[Finding]:
    """What about the machine is worth saying, worst first."""
    if not has_backend:
        yield Finding("FAIL", "nothing here can compute: install PyTorch with pip install 'octavo[torch]'")
    if host.free_bytes < _LITTLE_MEMORY:
        yield Finding(
            "NOTE",
            f"only {human_bytes(host.free_bytes)} of memory free: end other programs, or raise the container's limit",
        )
    if "avx" in host.isa and "avx2" not in host.isa:
        yield Finding("NOTE", "this CPU has no AVX2; expect a fraction of the usual speed")
    if host.cores < host.machine_cores:
        yield Finding(
            "NOTE", f"this process may use {host.cores} of {host.machine_cores} cores (affinity or container limit)"
        )
    if host.load_1min is not None and host.load_1min > host.machine_cores * 0.75:
        yield Finding("NOTE", f"other programs keep the cores busy (load {host.load_1min:.1f}): timings will be worse")


def _diagnose(wish: EngineConfig, host: Host, *, has_backend: bool) -> Iterator[Finding]:
    """Machine, model file, engine, tokens: each only if what it needs is there."""
    from octavo.hub.resolve import resolve_model

    yield from machine_findings(host, has_backend=has_backend)
    try:
        found = resolve_model(wish.model, progress=False, offline=True)
    except DownloadError:
        yield Finding("FAIL", f"the model {wish.model} is not on this machine yet; fetch it: octavo pull {wish.model}")
        return
    except OctavoError as error:
        yield Finding("FAIL", str(error))
        return
    yield Finding("PASS", f"model {found.name} is at {found.path}")
    is_default, finding = _identify(found.name, found.path)
    if finding is not None:
        yield finding
    if not has_backend:
        return
    from octavo.engine.load import load_engine

    try:
        loaded = load_engine(wish)
    except OctavoError as error:
        yield Finding("FAIL", f"the engine does not start: {error}")
        return
    try:
        yield from _examine(loaded, is_default=is_default)
    finally:
        loaded.close()


def _identify(name: str, path: Path) -> tuple[bool, Finding | None]:
    """Whether the file is the default model, the one with golden tokens, byte for byte."""
    from octavo.cli.golden import sha256_of
    from octavo.hub.resolve import ALIASES, DEFAULT_MODEL, PackagedModel

    default = ALIASES[DEFAULT_MODEL]
    assert isinstance(default, PackagedModel)
    if path.is_file() and sha256_of(path) == default.sha256:
        return True, Finding("PASS", "the file is the default model, byte for byte (sha256)")
    if name == DEFAULT_MODEL:
        way_out = f"octavo rm {name} --yes && octavo pull {name}"
        return False, Finding("FAIL", f"{path} is damaged: its sha256 is not that of {name}; run: {way_out}")
    return False, None


def show_bound(loaded: Engine) -> None:
    """Measure the machine and show the best possible figures; nothing where the backend cannot measure."""
    from octavo.cli.bound import bound_table, speed_rows

    backend, config = loaded.runner.backend, loaded.config
    cost, speed = backend.model_cost(), backend.measure_machine()
    if cost is None or speed is None:
        return
    chunk = config.wish.max_num_batched_tokens
    best = bound_table(cost, speed, max_model_len=config.max_model_len, chunk=chunk)
    show(facts_table("Measured", speed_rows(speed)), best)


def _examine(loaded: Engine, *, is_default: bool) -> Iterator[Finding]:
    """Show what will be used, then compare golden tokens."""
    from octavo.cli.golden import check_golden, golden_prompts
    from octavo.cli.summary import resolved_rows

    show(facts_table("Will be used", resolved_rows(loaded.config)))
    yield Finding("PASS", f"the engine is ready {loaded.load_s:.1f} s after the start of loading")
    show_bound(loaded)
    if not is_default or loaded.config.wish.load_format == "dummy":
        yield Finding("NOTE", "golden tokens: not compared, since they are known for the default model alone")
        return
    started = time.perf_counter()
    result = check_golden(loaded, golden_prompts())
    for difference in result.differences:
        yield Finding("FAIL", f"golden tokens: {difference}")
    if result.differences:
        yield Finding(
            "FAIL",
            "the engine computes something else than the reference: try --dtype float32, --device cpu and "
            "--backend torch in turn, and report the first that fails",
        )
    else:
        elapsed = time.perf_counter() - started
        yield Finding(
            "PASS",
            f"golden tokens: {result.num_tokens} tokens of {result.num_prompts} prompts are as they should be "
            f"({elapsed:.1f} s)",
        )
