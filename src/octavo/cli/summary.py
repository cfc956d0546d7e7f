"""The resolved configuration, as a person wants to read it."""

from __future__ import annotations

from pathlib import Path

from octavo.cli.console import human_bytes
from octavo.core.config import ResolvedConfig

Rows = list[tuple[str, str]]


def resolved_rows(config: ResolvedConfig) -> Rows:
    """What will run: one row per decision, for ``facts_table``. The notes say why."""
    wish = config.wish
    pools = ", ".join(
        f"{name}: {blocks:,} blocks x {config.block_size} = {blocks * config.block_size:,} tokens"
        for name, blocks in config.cache_groups
    )
    if len(config.cache_groups) == 1 and pools.startswith("full: "):
        pools = pools.removeprefix("full: ")
    chunks = f"fixed chunks of {wish.chunk_size}" if wish.chunking == "fixed" else "adaptive chunks"
    numerics = f", {wish.numerics} numerics" if config.backend == "native" else ""
    rows = [
        ("model", config.model_name),
        ("path", config.model_path),
        ("weights", _weights(config)),
        (
            "compute",
            f"{config.backend} on {config.device}, {config.dtype}{numerics}, {_count(config.threads, 'thread')}",
        ),
        (
            "KV cache",
            f"{pools}; {human_bytes(config.kv_cache_bytes)} of {config.kv_dtype}, touched as used",
        ),
        ("context", f"{config.max_model_len:,} tokens per sequence, prompt plus output"),
        ("batch", f"up to {config.max_num_seqs} sequences, {wish.max_num_batched_tokens:,} tokens per step"),
        ("scheduling", f"{wish.policy}, {chunks}, {wish.step_mode} steps"),
        ("prefix cache", "on" if wish.enable_prefix_caching else "off"),
        ("chat template", config.chat_template),
        ("fingerprint", config.system_fingerprint),
    ]
    return rows + [("note", note) for note in config.notes]


def _weights(config: ResolvedConfig) -> str:
    """Bytes in memory where the backend tells them, else on disk."""
    if config.weights_bytes:
        return human_bytes(config.weights_bytes)
    path = Path(config.model_path)
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in (".safetensors", ".gguf")]
    return f"{human_bytes(sum(file.stat().st_size for file in files))} on disk"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
