from __future__ import annotations

import pytest

from octavo.core.cache_group import CacheGroup
from octavo.core.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.engine.resolve_config import check_weights_fit, free_beside, size_pool
from octavo.kernels.base import WeightBytes
from octavo.kernels.machine import Machine, probe_machine

MODEL = ModelConfig(
    architecture="llama", name="toy", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=128, vocab_size=1000, max_position=2048, rms_norm_eps=1e-5, rope_theta=1e4, rope_dim=16,
    tied_embeddings=True,
)  # fmt: skip
BYTES = 1024  # of KV per token
GROUPS = MODEL.cache_groups


def test_the_pool_holds_what_all_sequences_need_when_memory_allows() -> None:
    pool = size_pool(EngineConfig(max_num_seqs=4), MODEL, 1 << 34, GROUPS, [16 * BYTES])
    assert pool.num_blocks[0] * 16 == 4 * 2048
    assert pool.max_model_len == 2048


def test_the_pool_takes_at_most_half_of_what_is_free_and_cuts_the_context_to_it() -> None:
    pool = size_pool(EngineConfig(max_num_seqs=64), MODEL, 2 << 20, GROUPS, [16 * BYTES])
    assert pool.num_blocks[0] * 16 * BYTES <= 1 << 20
    assert pool.max_model_len == pool.num_blocks[0] * 16 == 1024
    assert any("cut" in note for note in pool.notes)


@pytest.mark.parametrize(
    ("wish", "free", "words"),
    [
        (EngineConfig(max_model_len=4096), 1 << 34, "trained for 2048"),
        (EngineConfig(kv_cache_memory=1 << 30), 1 << 20, "only 1048576 are free"),
        (EngineConfig(kv_cache_memory=16 * BYTES), 1 << 30, "under two blocks"),
        (EngineConfig(max_model_len=2048, kv_cache_memory=64 * BYTES), 1 << 30, "holds 64 tokens"),
    ],
)
def test_wishes_that_cannot_be_met_name_the_value_and_the_limit(wish: EngineConfig, free: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        size_pool(wish, MODEL, free, GROUPS, [16 * BYTES])


def windowed(**fields: object) -> tuple[list[int], int]:
    """Blocks of a full group of one layer and a window group of five, each with blocks of 16 KiB per layer."""
    groups = (CacheGroup(kind="full", layers=(0,)), CacheGroup(kind="window", layers=(1, 2, 3, 4, 5), window=100))
    free = fields.pop("free", 1 << 34)
    pool = size_pool(EngineConfig(max_num_seqs=4, **fields), MODEL, free, groups, [1 << 14, 5 << 14])  # type: ignore[arg-type]
    return list(pool.num_blocks), pool.max_model_len


def test_a_window_group_gets_what_the_windows_of_all_sequences_and_one_chunk_fill() -> None:
    (full, window), longest = windowed(max_num_batched_tokens=512)
    assert (full, longest) == (4 * 128, 2048)
    assert window == 4 * 9 + 32  # 100 + 1 + 15 positions reach over 9 blocks at most


def test_where_memory_is_short_no_group_runs_out_before_the_full_one() -> None:
    (full, window), longest = windowed(free=60 * 6 << 14, max_num_batched_tokens=512)
    assert full == window == 30
    assert longest == 30 * 16
    (full, window), longest = windowed(free=(100 + 5 * 68) * 2 << 14, max_num_batched_tokens=512)
    assert (full, window) == (100, 68)
    (full, window), _ = windowed(kv_cache_memory=1 << 30)
    assert window == 4 * 9 + 128
    assert full == (1 << 30 >> 14) - 5 * window


def test_a_model_of_windows_alone_may_take_contexts_longer_than_its_pool() -> None:
    groups = (CacheGroup(kind="window", layers=(0, 1), window=100),)
    pool = size_pool(EngineConfig(kv_cache_memory=12 << 14), MODEL, 1 << 30, groups, [1 << 14])
    assert (pool.num_blocks, pool.max_model_len) == ((12,), 2048)


def test_the_machine_is_read_without_fail() -> None:
    machine = probe_machine()
    assert machine.num_cores >= 1
    assert machine.free_bytes > 1 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {"block_size": 0},
        {"policy": "lifo"},
        {"target_itl_ms": float("nan")},
        {"max_num_seqs": 1 << 30},
        {"max_num_seqs": "4"},
        {"max_num_seqs": 2.5},
        {"threads": True},
        {"enable_prefix_caching": "no"},
        {"model": None},
        {"aging_s": "10"},
    ],
)
def test_a_field_of_another_type_or_out_of_bounds_is_named(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        EngineConfig(**fields)  # type: ignore[arg-type]


def test_a_key_given_as_one_string_is_refused_rather_than_taken_for_its_letters() -> None:
    with pytest.raises(ConfigError, match="api_key is 'secret' but must be a tuple of strings"):
        ServerConfig(api_key="secret")  # type: ignore[arg-type]
    assert ServerConfig(api_key=("secret",), host="0.0.0.0").api_key == ("secret",)


def test_what_is_left_beside_the_model_is_the_smaller_view_less_the_scratch_and_never_negative() -> None:
    def left(before: int, now: int) -> int:
        views = (Machine(num_cores=1, free_bytes=free) for free in (before, now))
        return free_beside(WeightBytes(packed=100, loading=150), 7, *views)

    assert left(before=1000, now=850) == 850 - 7
    assert left(before=1000, now=990) == 1000 - 100 - 7
    assert left(before=1000, now=7) == left(before=100, now=1000) == left(before=50, now=1000) == 0


def test_weights_may_take_all_that_is_free_while_they_are_loaded() -> None:
    weights = WeightBytes(packed=100, loading=150)
    check_weights_fit(MODEL, weights, Machine(num_cores=1, free_bytes=150))
    with pytest.raises(ConfigError, match=r"needs 150 bytes .* only 149 are free"):
        check_weights_fit(MODEL, weights, Machine(num_cores=1, free_bytes=149))


def test_a_context_that_just_fits_the_pool_is_served_and_nothing_is_cut() -> None:
    fits = EngineConfig(max_model_len=64, kv_cache_memory=64 * BYTES)
    pool = size_pool(fits, MODEL, 1 << 30, GROUPS, [16 * BYTES])
    assert (pool.max_model_len, pool.notes) == (64, ("KV pool as given",))


@pytest.mark.parametrize(
    ("wish", "way_out"),
    [(EngineConfig(), "free memory, take a smaller model"), (EngineConfig(kv_cache_memory=1), "raise --kv-cache")],
)
def test_a_pool_too_small_to_use_says_what_would_help(wish: EngineConfig, way_out: str) -> None:
    with pytest.raises(ConfigError, match=f"under two blocks of {16 * BYTES}; .*{way_out}"):
        size_pool(wish, MODEL, 16 * BYTES, GROUPS, [16 * BYTES])


def test_a_pool_may_take_all_that_is_free_and_may_have_two_blocks() -> None:
    two_blocks = 2 * 16 * BYTES
    pool = size_pool(EngineConfig(kv_cache_memory=two_blocks), MODEL, two_blocks, GROUPS, [16 * BYTES])
    assert (pool.num_blocks[0], pool.max_model_len) == (2, 32)


@pytest.mark.parametrize(("free", "words"), [(1 << 34, "room for 4 full sequences"), (2 << 20, "half of the memory")])
def test_the_notes_say_what_sized_the_pool(free: int, words: str) -> None:
    assert any(
        words in note for note in size_pool(EngineConfig(max_num_seqs=4), MODEL, free, GROUPS, [16 * BYTES]).notes
    )
