"""Every test of the kit runs on every backend."""

from __future__ import annotations

from typing import Any

import pytest
from backends import BACKENDS


@pytest.fixture(params=BACKENDS)
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def maker(backend_name: str) -> Any:
    return BACKENDS[backend_name][0]


@pytest.fixture
def tolerance(backend_name: str) -> float:
    return BACKENDS[backend_name][1]
