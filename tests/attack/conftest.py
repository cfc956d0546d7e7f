"""Servers under attack, one per session."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacked_process import Attacked, attacked

# the attacks are there, for a benchmark measures them too
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session", autouse=True)
def _many_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="session")
def stub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server whose engine has no model."""
    with attacked("stub", tmp_path_factory.mktemp("stub") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def model_server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """A server with the default model."""
    with attacked(str(model_path), tmp_path_factory.mktemp("model") / "log") as server:
        yield server
