"""From the wish to what will run: every ``auto`` decided from the model and the machine."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.cache_group import CacheGroup
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import WeightBytes
from octavo.kernels.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many KV blocks, how long a sequence may get, and why."""

    num_blocks: tuple[int, ...]  # of each cache group
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


def size_pool(
    wish: EngineConfig, model: ModelConfig, free_bytes: int, groups: Sequence[CacheGroup], block_bytes: Sequence[int]
) -> PoolSize:
    """Size the KV pool: what max_num_seqs full sequences need, at most half of ``free_bytes``.

    free_bytes: of memory, beside the weights and scratch; block_bytes: of a block of each group. Each group gets as
    many blocks as the full one, but a window group no more than max_num_seqs windows and the longest chunk fill: so
    none runs out before the full one, whatever the sequences' lengths. Raises ConfigError if a wished max_model_len
    exceeds the model's context or does not fit the pool, or if nothing useful fits.
    """
    notes: list[str] = []
    check_context(wish, model)
    size, longest = wish.block_size, wish.max_model_len or model.max_position
    chunk = -(-wish.max_num_batched_tokens // size)
    wanted = [
        wish.max_num_seqs * group.blocks_for(longest, size)
        + (chunk if group.blocks_for(longest, size) * size < longest else 0)
        for group in groups
    ]
    if wish.kv_cache_memory is not None:
        available = wish.kv_cache_memory
        if available > free_bytes:
            raise ConfigError(
                f"kv_cache_memory is {available} bytes but only {free_bytes} are free beside the weights; "
                "lower --kv-cache-memory"
            )
        notes.append("KV pool as given")
    else:
        all_wanted = sum(count * size for count, size in zip(wanted, block_bytes, strict=True))
        available = min(all_wanted, free_bytes // 2)
        notes.append(
            f"KV pool: room for {wish.max_num_seqs} full sequences"
            if available == all_wanted
            else "KV pool: half of the memory that the weights leave"
        )
    num_blocks = _share_out(
        available, block_bytes, [None if group.kind == "full" else n for group, n in zip(groups, wanted, strict=True)]
    )
    if min(num_blocks) < 2:
        way_out = (
            f"{free_bytes} are free beside the weights and scratch; free memory, take a smaller model, or lower "
            "--max-num-batched-tokens or --block-size"
            if wish.kv_cache_memory is None
            else "raise --kv-cache-memory"
        )
        raise ConfigError(f"the KV pool has {available} bytes, under two blocks of {sum(block_bytes)}; {way_out}")
    pool_tokens = min(
        (n * size for group, n in zip(groups, num_blocks, strict=True) if n < group.blocks_for(longest, size)),
        default=longest,
    )
    if wish.max_model_len is not None and wish.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len is {wish.max_model_len} but the KV pool holds {pool_tokens} tokens; "
            "raise --kv-cache-memory or lower --max-model-len"
        )
    if longest > pool_tokens:
        notes.append(f"max_model_len cut from {longest} to the pool's {pool_tokens} tokens")
    return PoolSize(num_blocks=num_blocks, max_model_len=min(longest, pool_tokens), notes=tuple(notes))


def _share_out(available: int, block_bytes: Sequence[int], most: Sequence[int | None]) -> tuple[int, ...]:
    """As many blocks for each group, but at most ``most`` (None: any number), as ``available`` bytes hold."""
    if None not in most:
        most = [None] * len(most)

    def counts(blocks: int) -> tuple[int, ...]:
        return tuple(blocks if limit is None else min(blocks, limit) for limit in most)

    def fits(blocks: int) -> bool:
        return sum(n * size for n, size in zip(counts(blocks), block_bytes, strict=True)) <= available

    return counts(bisect_left(range(available + 1), True, key=lambda blocks: not fits(blocks)) - 1)
