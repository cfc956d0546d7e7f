"""The real model in a real engine, one per backend and shape, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from offline import Offline

from octavo.core.config import EngineConfig
from octavo.engine.load import load_engine

BACKENDS = [name for name, module in (("native", "octavo._native"), ("torch", "torch")) if find_spec(module)]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this installation has."""
    return str(request.param)


@pytest.fixture(scope="session")
def engine_of(model_path: Path) -> Iterator[Callable[..., Offline]]:
    """Engines by their config, loaded once per session and emptied between uses."""
    engines: dict[EngineConfig, Offline] = {}

    def get(**fields: object) -> Offline:
        config = EngineConfig(model=str(model_path), **{"max_model_len": 1024, **fields})  # type: ignore[arg-type]
        if config not in engines:
            engines[config] = Offline(load_engine(config))
        return engines[config]

    yield get
    for engine in engines.values():
        engine.loaded.close()
