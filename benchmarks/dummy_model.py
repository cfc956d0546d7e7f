"""Write a GGUF of random weights in any llama's shape and format, which octavo and llama.cpp read.

    python benchmarks/dummy_model.py --shape tinyllama-1.1b --format Q4_0 --out tinyllama-random-Q4_0.gguf
    python benchmarks/dummy_model.py --shape path/to/config.json --format BF16 --tokenizer other.gguf --out FILE

The weights are those that ``octavo serve --load-format dummy`` makes for the same shape and format, to the byte. The
vocabulary is that of ``--tokenizer``, filled up with unused tokens to the shape's size; without it, one that spells
every text in bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from octavo.core.config import DummyFormat
from octavo.core.errors import ModelFileError, OctavoError
from octavo.core.model_config import ModelConfig
from octavo.model.dummy import DummyWeights, open_dummy
from octavo.model.gguf_model import write_model
from octavo.model.hf_model import read_hf_config
from octavo.text.dummy_vocabulary import dummy_vocabulary
from octavo.text.vocabulary import TokenKind
from octavo.weights.gguf_file import GGUFFile

#: Well-known shapes as their config.json has them.
SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 5632,
        "vocab_size": 32_000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
}


def shape_config(shape: str) -> ModelConfig:
    """Of a name in SHAPES, a config.json, a folder with one, or a GGUF file. ``ModelFileError`` for anything else."""
    if shape in SHAPES:
        return read_hf_config(dict(SHAPES[shape]), shape, f"{shape}-random")
    path = Path(shape)
    if not path.exists():
        raise ModelFileError(f"{shape!r} is neither a file or folder here, nor one of {', '.join(SHAPES)}")
    return open_dummy(path.parent if path.name == "config.json" else path, "F32").config


def write_shape_folder(shape: str, folder: Path) -> Path:
    """A folder with the config.json of a name in SHAPES, which ``--load-format dummy`` takes as MODEL."""
    folder = folder / f"{shape}-random"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1), encoding="utf-8")
    return folder


def borrowed_vocabulary(metadata: Mapping[str, object], vocab_size: int) -> dict[str, object]:
    """The ``tokenizer.*`` keys of a GGUF file, filled up with unused tokens to ``vocab_size``.

    Raises ``ModelFileError`` if there are more tokens than that, or none.
    """
    keys = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokens = keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple):
        raise ModelFileError("the file that --tokenizer names has no tokenizer.ggml.tokens")
    missing = vocab_size - len(tokens)
    if missing < 0:
        raise ModelFileError(f"the vocabulary has {len(tokens)} tokens but the shape has room for {vocab_size}")
    fillers: dict[str, tuple[object, ...]] = {
        "tokenizer.ggml.tokens": tuple(f"[unused{i}]" for i in range(len(tokens), vocab_size)),
        "tokenizer.ggml.token_type": (int(TokenKind.UNUSED),) * missing,
        "tokenizer.ggml.scores": (0.0,) * missing,
    }
    for key, filler in fillers.items():
        found = keys.get(key)
        if isinstance(found, tuple):
            keys[key] = found + filler
    return keys


def write_dummy_model(
    out: Path, config: ModelConfig, encoding: DummyFormat, *, seed: int = 0, tokenizer: Path | None = None
) -> None:
    """One tensor in memory at a time. Raises ``ModelFileError``."""
    vocabulary = dummy_vocabulary(config.vocab_size)
    if tokenizer is not None:
        file = GGUFFile(tokenizer)
        vocabulary = borrowed_vocabulary(file.metadata, config.vocab_size)
        file.close()
    write_model(out, DummyWeights(config, encoding, seed=seed), vocabulary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, help=f"{', '.join(SHAPES)}, a config.json, a folder or a GGUF file")
    parser.add_argument("--format", default="Q4_0", choices=get_args(DummyFormat), help="of the matrices")
    parser.add_argument("--tokenizer", type=Path, help="GGUF file whose vocabulary to take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="the GGUF file to write")
    args = parser.parse_args()
    started = time.perf_counter()
    try:
        config = shape_config(args.shape)
        write_dummy_model(args.out, config, args.format, seed=args.seed, tokenizer=args.tokenizer)
    except OctavoError as error:
        sys.exit(f"dummy_model: {error}")
    print(f"{args.out}: {args.out.stat().st_size:,} bytes in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
