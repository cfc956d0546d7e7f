"""From the wish to what will run: every ``auto`` decided from the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import WeightBytes
from octavo.kernels.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many KV blocks, how long a sequence may get, and why."""

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...]


def check_weights_fit(model: ModelConfig, weights: WeightBytes, machine: Machine) -> None:
    """Raise ConfigError if loading would take more memory than there is: the system would end the process for it."""
    if weights.loading > machine.free_bytes:
        raise ConfigError(
            f"{model.name} needs {weights.loading:,} bytes while it is loaded ({weights.packed:,} once it is) but "
            f"only {machine.free_bytes:,} are free; take a smaller or more quantised model, free memory, or raise "
            "the container's limit"
        )


def free_beside(weights: WeightBytes, scratch_bytes: int, before: Machine, now: Machine) -> int:
    """Memory that is left for the KV pool once the model is loaded.

    before, now: probed before and after loading. What is free now may still count weights whose pages have not been
    touched, and a neighbour may have let go of memory that it will take again: the smaller view counts. Scratch is
    mapped, but mostly touched by the first long prompt only.
    """
    return max(0, min(now.free_bytes, before.free_bytes - weights.packed) - scratch_bytes)


def check_context(wish: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a wished max_model_len exceeds the model's context."""
    if wish.max_model_len is not None and wish.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {wish.max_model_len} but {model.name} was trained for {model.max_position} positions; "
            "lower --max-model-len"
        )


def size_pool(wish: EngineConfig, model: ModelConfig, free_bytes: int, kv_bytes_per_token: int) -> PoolSize:
    """Size the KV pool: what max_num_seqs full sequences need, at most half of ``free_bytes``.

    free_bytes: of memory, beside the weights and scratch. Raises ConfigError if a wished max_model_len exceeds the
    model's context or does not fit the pool, or if nothing useful fits.
    """
    notes: list[str] = []
    check_context(wish, model)
    longest = wish.max_model_len or model.max_position
    block_bytes = wish.block_size * kv_bytes_per_token
    if wish.kv_cache_memory is not None:
        available = wish.kv_cache_memory
        if available > free_bytes:
            raise ConfigError(
                f"kv_cache_memory is {available} bytes but only {free_bytes} are free beside the weights; "
                "lower --kv-cache-memory"
            )
        notes.append("KV pool as given")
    else:
        wanted = wish.max_num_seqs * -(-longest // wish.block_size) * block_bytes
        available = min(wanted, free_bytes // 2)
        notes.append(
            f"KV pool: room for {wish.max_num_seqs} full sequences"
            if available == wanted
            else "KV pool: half of the memory that the weights leave"
        )
    num_blocks = available // block_bytes
    if num_blocks < 2:
        way_out = (
            f"{free_bytes} are free beside the weights and scratch; free memory, take a smaller model, or lower "
            "--max-num-batched-tokens or --block-size"
            if wish.kv_cache_memory is None
            else "raise --kv-cache-memory"
        )
        raise ConfigError(f"the KV pool has {available} bytes, under two blocks of {block_bytes}; {way_out}")
    pool_tokens = num_blocks * wish.block_size
    if wish.max_model_len is not None and wish.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len is {wish.max_model_len} but the KV pool holds {pool_tokens} tokens; "
            "raise --kv-cache-memory or lower --max-model-len"
        )
    if longest > pool_tokens:
        notes.append(f"max_model_len cut from {longest} to the pool's {pool_tokens} tokens")
    return PoolSize(num_blocks=num_blocks, max_model_len=min(longest, pool_tokens), notes=tuple(notes))
