"""From the wish to what will run: every ``auto`` decided from the model and the machine."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.engine.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many KV blocks, how long a sequence may get, and why."""

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...]


def size_pool(wish: EngineConfig, model: ModelConfig, machine: Machine, kv_bytes_per_token: int) -> PoolSize:
    """Size the KV pool (design: min of what max_num_seqs full sequences need and half of the memory free *now*).

    Raises ConfigError if a wished max_model_len exceeds the model's context or does not fit the pool.
    """
    notes: list[str] = []
    if wish.max_model_len is not None and wish.max_model_len > model.max_position:
        raise ConfigError(
            f"max_model_len is {wish.max_model_len} but {model.name} was trained for {model.max_position} positions; "
            "lower --max-model-len"
        )
    longest = wish.max_model_len or model.max_position
    block_bytes = wish.block_size * kv_bytes_per_token
    if wish.kv_cache_memory is not None:
        available = wish.kv_cache_memory
        if available > machine.free_bytes:
            raise ConfigError(
                f"kv_cache_memory is {available} bytes but only {machine.free_bytes} are free; lower --kv-cache-memory"
            )
        notes.append("KV pool as given")
    else:
        wanted = wish.max_num_seqs * -(-longest // wish.block_size) * block_bytes
        available = min(wanted, machine.free_bytes // 2)
        notes.append(
            f"KV pool: room for {wish.max_num_seqs} full sequences"
            if available == wanted
            else "KV pool: half of the memory free now"
        )
    num_blocks = available // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"the KV pool has {available} bytes, under two blocks of {block_bytes}; raise --kv-cache-memory"
        )
    pool_tokens = num_blocks * wish.block_size
    if wish.max_model_len is not None and wish.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len is {wish.max_model_len} but the KV pool holds {pool_tokens} tokens; "
            "raise --kv-cache-memory or lower --max-model-len"
        )
    if longest > pool_tokens:
        notes.append(f"max_model_len cut from {longest} to the pool's {pool_tokens} tokens")
    return PoolSize(num_blocks=num_blocks, max_model_len=min(longest, pool_tokens), notes=tuple(notes))
