"""Fixtures that more than one folder uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Reference values: tokens, logprobs; see tests/data/README.md."""
    return DATA


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched into the user's cache if it is not there yet."""
    given = os.environ.get("OCTAVO_TEST_MODEL")
    if given:
        return Path(given)
    from octavo.model.weights.hub import resolve_model

    return resolve_model("smollm2-135m").path
