"""Loading on machines with little memory, made up: what is committed, and what is refused before it is read."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.engine import load
from octavo.engine.load import load_engine
from octavo.kernels.machine import Machine
from octavo.model.decoder import weight_bytes
from octavo.model.open_model import open_weights
from weights.gguf_writer import random_llama

MIB = 1 << 20
BACKENDS = [name for name, module in (("native", "octavo._native"), ("torch", "torch")) if find_spec(module)]


@pytest.fixture(scope="module", params=["F32", "Q8_0", "BF16"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(found, encoding=request.param, seed=1)
    return found


@pytest.fixture(params=BACKENDS)
def wish(request: pytest.FixtureRequest, path: Path) -> EngineConfig:
    return EngineConfig(model=str(path), backend=request.param, device="cpu", threads=1, max_num_batched_tokens=64)


def needs(wish: EngineConfig) -> tuple[int, int, int]:
    """(weights once packed, peak while loading, scratch) of this model, as the backend tells."""
    loaded = load_engine(wish)
    try:
        backend = loaded.runner.backend
        weights = weight_bytes(open_weights(Path(wish.model)), backend)
        assert weights.packed == pytest.approx(loaded.config.weights_bytes, rel=0.02), "told and packed differ"
        return weights.packed, weights.loading, backend.scratch_bytes()
    finally:
        loaded.close()


def machines(monkeypatch: pytest.MonkeyPatch, *free_bytes: int) -> None:
    """Let the machine have so much memory the first time it is asked, and so on; the last figure stays."""

    def figures() -> Iterator[int]:
        yield from free_bytes
        while True:
            yield free_bytes[-1]

    free = figures()
    monkeypatch.setattr(load, "probe_machine", lambda: Machine(num_cores=1, free_bytes=next(free)))


@pytest.mark.parametrize("seen", ["weights touched", "weights mapped only", "a neighbour came", "a neighbour left"])
def test_weights_scratch_and_pool_together_stay_within_what_was_free(
    wish: EngineConfig, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    packed, loading, scratch = needs(wish)
    left = 6 * MIB + loading - packed
    free = packed + scratch + left
    later = {"weights touched": free - packed, "weights mapped only": free, "a neighbour came": free - packed - MIB}
    machines(monkeypatch, free, later.get(seen, free + 100 * MIB))
    loaded = load_engine(wish)
    try:
        limit = left - (MIB if seen == "a neighbour came" else 0)
        assert 0.4 * limit < loaded.config.kv_cache_bytes <= limit // 2
        assert packed + scratch + loaded.config.kv_cache_bytes <= free
    finally:
        loaded.close()


def test_weights_that_do_not_fit_are_refused_before_any_is_packed(
    wish: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, loading, _ = needs(wish)
    monkeypatch.setattr(load.decoder, "load", lambda *_: pytest.fail("it was read"))
    machines(monkeypatch, loading - 1)
    with pytest.raises(ConfigError) as refused:
        load_engine(wish)
    for words in (f"{loading:,} bytes", f"({packed:,} once", f"{loading - 1:,} are free", "container's limit"):
        assert words in str(refused.value)


def test_room_for_the_weights_alone_is_not_enough_and_the_error_says_what_is(
    wish: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, loading, scratch = needs(wish)
    machines(monkeypatch, max(loading, packed + scratch))
    with pytest.raises(ConfigError, match=r"under two blocks of .* free beside the weights and scratch"):
        load_engine(wish)


def test_a_pool_of_a_wished_size_must_fit_beside_the_weights(
    wish: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, loading, scratch = needs(wish)
    free = loading + scratch + 4 * MIB
    machines(monkeypatch, free)
    left = free - packed - scratch
    sized = {**{f: getattr(wish, f) for f in ("model", "backend", "device", "threads", "max_num_batched_tokens")}}
    with pytest.raises(ConfigError, match=f"only {left} are free beside the weights"):
        load_engine(EngineConfig(**sized, kv_cache_memory=left + 1))
    load_engine(EngineConfig(**sized, kv_cache_memory=left)).close()
