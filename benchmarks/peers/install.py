"""Install the peers that octavo is measured beside, each into a folder of its own. Run it again to go on or to update.

    python benchmarks/peers/install.py                                  # all, into ~/.cache/octavo-peers
    python benchmarks/peers/install.py --peers llama.cpp,vllm --into /tmp/peers

A peer that cannot be installed is said, with its reason, and does not keep the others from being installed. llama.cpp
is compiled: 10 to 40 minutes. PyTorch for Linux comes from the index that pip is set up with; vLLM needs its CPU build.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes import PEERS, Peer, Recipe, RecipeError, Step, recipe

from octavo.cli.host import probe_host

DEFAULT_ROOT = Path.home() / ".cache" / "octavo-peers"
_TAIL_LINES = 12


def peers_of(text: str) -> list[Peer]:
    """``llama.cpp,vllm`` -> those two; ``all`` -> all. ArgumentTypeError for other names."""
    if text == "all":
        return list(PEERS)
    names = [name.strip() for name in text.split(",")]
    found = [peer for peer in PEERS if peer in names]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(PEERS)}")
    return found


def installed_version(wanted: Recipe) -> str | None:
    """The version that is installed and loads; None if none."""
    try:
        done = subprocess.run(wanted.version_argv, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def install(wanted: Recipe, *, niceness: int, again: bool = False) -> str:
    """Run a recipe's steps and return the version installed. Raises RecipeError."""
    found = None if again else installed_version(wanted)
    if found is not None:
        return found
    if reason := wanted.missing():
        raise RecipeError(reason)
    wanted.folder.mkdir(parents=True, exist_ok=True)
    with (wanted.folder / "install.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RecipeError(f"another installation is at work in {wanted.folder}; wait for it") from error
        for step in wanted.steps:
            if step.skip_if is None or not step.skip_if.exists():
                _run(step, wanted.folder / "install.log", niceness)
    found = installed_version(wanted)
    if found is None:
        raise RecipeError(f"every step ran, but {' '.join(wanted.version_argv)} fails")
    return found


def _run(step: Step, log: Path, niceness: int) -> None:
    started = time.monotonic()
    print(f"    {step.name} ...", flush=True)
    if step.function is not None:
        step.function()
        return
    with log.open("a", encoding="utf-8") as stream:
        stream.write(f"\n$ {' '.join(step.argv)}\n")
        stream.flush()
        try:
            done = subprocess.run(
                step.argv,
                stdout=stream,
                stderr=stream,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **step.env},
                preexec_fn=lambda: os.nice(niceness),  # this process has one thread
                check=False,
            )
        except OSError as error:
            raise RecipeError(f"{step.argv[0]}: {error.strerror}") from error
    if done.returncode and not step.may_fail:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        raise RecipeError(f"{step.name} failed after {time.monotonic() - started:.0f} s; the end of {log}:\n{tail}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, default=DEFAULT_ROOT, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--peers", type=peers_of, default=list(PEERS), metavar="NAME,...", help=", ".join(PEERS))
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="compilers at once (1)")
    parser.add_argument("--nice", type=int, default=19, metavar="N", help="niceness of every step (19)")
    parser.add_argument("--again", action="store_true", help="run the steps also where a peer is installed")
    args = parser.parse_args(arguments)
    isa, failures = probe_host().isa, 0
    for peer in args.peers:
        wanted = recipe(peer, args.into.absolute(), python=sys.executable, isa=isa, jobs=args.jobs)
        print(f"{peer}:", flush=True)
        try:
            print(f"    {install(wanted, niceness=args.nice, again=args.again)} in {wanted.folder}", flush=True)
        except RecipeError as error:
            failures += 1
            print(f"    not installed: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
