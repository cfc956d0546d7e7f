from __future__ import annotations

import pytest

from octavo.core.config import EngineConfig, ServerConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.engine.resolve_config import size_pool
from octavo.kernels.machine import probe_machine

MODEL = ModelConfig(
    architecture="llama", name="toy", hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    intermediate_size=128, vocab_size=1000, max_position=2048, rms_norm_eps=1e-5, rope_theta=1e4, rope_dim=16,
    tied_embeddings=True,
)  # fmt: skip
BYTES = 1024  # of KV per token


def test_the_pool_holds_what_all_sequences_need_when_memory_allows() -> None:
    pool = size_pool(EngineConfig(max_num_seqs=4), MODEL, 1 << 34, BYTES)
    assert pool.num_blocks * 16 == 4 * 2048
    assert pool.max_model_len == 2048


def test_the_pool_takes_at_most_half_of_what_is_free_and_cuts_the_context_to_it() -> None:
    pool = size_pool(EngineConfig(max_num_seqs=64), MODEL, 2 << 20, BYTES)
    assert pool.num_blocks * 16 * BYTES <= 1 << 20
    assert pool.max_model_len == pool.num_blocks * 16 == 1024
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
        size_pool(wish, MODEL, free, BYTES)


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


def test_a_pool_may_take_all_that_is_free_and_may_have_two_blocks() -> None:
    two_blocks = 2 * 16 * BYTES
    pool = size_pool(EngineConfig(kv_cache_memory=two_blocks), MODEL, two_blocks, BYTES)
    assert (pool.num_blocks, pool.max_model_len) == (2, 32)


@pytest.mark.parametrize(("free", "words"), [(1 << 34, "room for 4 full sequences"), (2 << 20, "half of the memory")])
def test_the_notes_say_what_sized_the_pool(free: int, words: str) -> None:
    assert any(words in note for note in size_pool(EngineConfig(max_num_seqs=4), MODEL, free, BYTES).notes)
