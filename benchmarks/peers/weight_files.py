"""The same weights in every format that a contender reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from bf16_copy import write_bf16_copy
from contenders import Contender, Files, Format

from octavo.cli.console import remark
from octavo.hub.resolve import resolve_model

Model = Literal["135m", "1.1b"]
MODELS: tuple[Model, ...] = ("135m", "1.1b")
#: How many times as long a token takes as with the 135M model, about: by weights.
SLOWNESS: dict[Model, float] = {"135m": 1.0, "1.1b": 8.0}
TITLES: dict[Model, str] = {"135m": "SmolLM2-135M-Instruct", "1.1b": "TinyLlama-1.1B shape, random weights"}


#: Of the random model; TinyLlama itself ends at 2,048, which is too short for some workloads.
MAX_POSITION = 8192


class NoWeights(Exception):
    """A file cannot be made; says what is missing."""


def prepare(model: Model, contenders: Sequence[Contender], root: Path) -> tuple[Files, dict[Contender, str]]:
    """Make what is not there yet, under ``root``; also who has to be left out, and why."""
    folder = root / "models" / model
    folder.mkdir(parents=True, exist_ok=True)
    gguf: dict[Format, Path] = {}
    left_out: dict[Contender, str] = {}
    bf16_folder: Path | None = None
    for contender in contenders:
        try:
            if contender.peer in ("vllm", "transformers"):
                bf16_folder = _safetensors(folder, _gguf(model, "bf16", folder, root), root)
            elif contender.format not in gguf:
                gguf[contender.format] = _gguf(model, contender.format, folder, root)
        except NoWeights as error:
            left_out[contender] = str(error)
    return Files(gguf=gguf, folder=bf16_folder), left_out


def _gguf(model: Model, kind: Format, folder: Path, root: Path) -> Path:
    if model == "1.1b":
        return _dummy(kind, folder)
    original = resolve_model("smollm2-135m").path
    if kind == "Q4_1":
        return original
    bf16 = folder / "model-bf16.gguf"
    if not bf16.exists():
        remark("  writing bf16 weights")
        partial = bf16.with_suffix(".part")
        write_bf16_copy(original, partial)
        partial.rename(bf16)
    if kind == "bf16":
        return bf16
    target = folder / f"model-{kind}.gguf"
    quantize = root / "llama.cpp" / "build" / "bin" / "llama-quantize"
    if not target.exists():
        if not quantize.exists():
            raise NoWeights(f"{kind} weights are made by llama.cpp's llama-quantize, which is not in {quantize.parent}")
        remark(f"  writing {kind} weights")
        # every matrix in that format: by default the embedding, which is also the head, would have six bits
        _run([str(quantize), "--pure", str(bf16), str(target), kind], target)
    return target


def _safetensors(folder: Path, source: Path, root: Path) -> Path:
    target = folder / "bf16"
    if not target.exists():
        found = [root / peer / "venv" / "bin" / "python" for peer in ("transformers", "vllm")]
        python = next((path for path in found if path.exists()), None)
        if python is None:
            raise NoWeights("safetensors are written by the transformers of a peer, and neither it nor vllm is there")
        remark("  writing bf16 safetensors")
        _run([str(python), str(Path(__file__).with_name("to_safetensors.py")), str(source), str(target)], target)
    return target


def _run(argv: list[str], target: Path) -> None:
    """Run a command that makes ``target``, which then is there whole or not at all."""
    partial = target.with_name(f"{target.name}.part")
    argv = [str(partial) if word == str(target) else word for word in argv]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise NoWeights(f"{' '.join(argv)} failed: {done.stderr.strip()[-400:]}")
    partial.rename(target)


def _dummy(kind: Format, folder: Path) -> Path:
    """Random weights of that shape, with room for the longest prompts."""
    from dummy_model import SHAPES

    target, shape = folder / f"random-{kind}.gguf", folder / "config.json"
    if not target.exists():
        remark(f"  writing random {kind} weights")
        shape.write_text(json.dumps({**SHAPES["tinyllama-1.1b"], "max_position_embeddings": MAX_POSITION}))
        script = str(Path(__file__).parents[1] / "dummy_model.py")
        argv = [sys.executable, script, "--shape", str(shape), "--format", kind.upper(), "--out", str(target)]
        _run(argv, target)
    return target
