"""Who is measured, on which file of the same weights, and the command that starts each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recipes import Peer
from workloads import Workload

Format = Literal["Q4_1", "Q4_0", "bf16"]
HOST = "127.0.0.1"
#: Longest sequence that a server must take, where it wants to be told.
MAX_MODEL_LEN = 4352
#: What the load client asks beforehand to learn how a server counts, where every character is a token.
PROBE_TOKENS = 1024
_MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Contender:
    """One server on one format of the weights."""

    peer: Peer | Literal["octavo"]
    format: Format

    @property
    def name(self) -> str:
        return f"{self.peer} {self.format}"

    @property
    def has_http(self) -> bool:
        return self.peer != "openvino"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A column of the table: octavo against a peer."""

    label: str
    ours: Contender
    theirs: Contender
    group: Literal["same weights", "fastest formats"]


OCTAVO_FASTEST: Format = "Q4_0"
#: A peer's formats, its fastest last. llama.cpp repacks Q4_0 for the processor; bf16, which it reads too, decoded 1, 8
#: and 32 streams at 0.5 to 0.6 of that speed (llama-batched-bench, one thread of a Sapphire Rapids).
FORMATS: Mapping[Peer, tuple[Format, ...]] = {
    "llama.cpp": ("Q4_1", "Q4_0"),
    "openvino": ("Q4_1",),
    "vllm": ("bf16",),
    "transformers": ("bf16",),
}


def pairs_of(peers: Sequence[Peer], formats: Sequence[Format]) -> list[Pair]:
    """Octavo on the same file as each peer; then both in the format that is its fastest, where that is another."""
    pairs = []
    for peer in peers:
        for kind in FORMATS[peer]:
            if kind in formats:
                ours = Contender("octavo", kind)
                pairs.append(Pair(label=peer, ours=ours, theirs=Contender(peer, kind), group="same weights"))
    for peer in peers:
        fastest = FORMATS[peer][-1]
        if fastest in formats and OCTAVO_FASTEST in formats:
            ours = Contender("octavo", OCTAVO_FASTEST)
            pairs.append(Pair(label=peer, ours=ours, theirs=Contender(peer, fastest), group="fastest formats"))
    return pairs


def contenders_of(pairs: Sequence[Pair]) -> list[Contender]:
    """Everybody in the pairs, once; octavo next to the peers it is compared with."""
    return list(dict.fromkeys(contender for pair in pairs for contender in (pair.ours, pair.theirs)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """The same weights: a GGUF file by format, and a folder of bfloat16 safetensors."""

    gguf: Mapping[Format, Path]
    folder: Path | None

    def bytes_of(self, contender: Contender) -> int:
        path = self.path_for(contender)
        return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.iterdir())

    def path_for(self, contender: Contender) -> Path:
        if contender.peer in ("vllm", "transformers"):
            assert self.folder is not None, "made where one of them is measured"
            return self.folder
        return self.gguf[contender.format]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How to start a contender. ``model``: the name that requests give; None: ask the server."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    model: str | None = None
    extra_body: Mapping[str, object] = field(default_factory=dict)
    memory_bytes: int  # about what it takes
    starts_quickly: bool = False  # so that it is started for each workload with settings that fit that


def command_for(
    contender: Contender, files: Files, root: Path, workload: Workload, *, port: int, threads: int
) -> Command:
    """Defaults wherever a server has them that fit a machine this small; what is set otherwise says why."""
    path, weights = files.path_for(contender), files.bytes_of(contender)
    address = ["--host", HOST, "--port", str(port)]
    python = root / contender.peer / "venv" / "bin" / "python"
    env: dict[str, str] = {}
    match contender.peer:
        case "octavo":
            argv = [sys.executable, "-m", "octavo", "serve", str(path), *address, "--threads", str(threads)]
            return Command(argv=tuple(argv), memory_bytes=2 * weights + 1500 * _MB)
        case "llama.cpp":
            # a slot for every stream, each with the room it needs: with its four default slots the others would wait
            slots = workload.slots
            room = max(PROBE_TOKENS, -(-(workload.longest + 8) // 256) * 256)
            argv = [str(root / "llama.cpp" / "build" / "bin" / "llama-server"), "--model", str(path), *address]
            argv += ["--threads", str(threads), "--parallel", str(slots), "--ctx-size", str(slots * room)]
            argv += ["--no-kv-unified", "--no-ui", "--offline"]
            return Command(argv=tuple(argv), memory_bytes=2 * weights + 2500 * _MB, starts_quickly=True)
        case "vllm":
            argv = [str(python.with_name("vllm")), "serve", str(path), *address, "--served-model-name", "bench"]
            argv += ["--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "64"]
            argv += ["--gpu-memory-utilization", "0.5"]  # on a CPU a share of memory that it checks, no more
            env = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
            return Command(argv=tuple(argv), env=env, model="bench", memory_bytes=2 * weights + 4500 * _MB)
        case "transformers":
            argv = [str(python.with_name("transformers")), "serve", str(path), *address, "--dtype", "bfloat16"]
            env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
            return Command(argv=tuple(argv), env=env, model=str(path), memory_bytes=2 * weights + 2500 * _MB)
        case "openvino":
            argv = [str(python), str(Path(__file__).with_name("openvino_driver.py")), str(path), str(threads)]
            return Command(argv=tuple(argv), memory_bytes=3 * weights + 3000 * _MB)
