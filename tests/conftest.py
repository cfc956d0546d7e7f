"""Fixtures that more than one folder uses."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

DATA = Path(__file__).parent / "data"

# On a busy machine an example may take long without anything being wrong. CI runs the same examples every time.
settings.register_profile(
    "octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("octavo")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # What a shell starts in the background ignores Ctrl-C, and so do its children; tests send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
    from octavo.hub.resolve import resolve_model

    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def reference(data_dir: Path) -> list[dict[str, Any]]:
    """The default model in float32, run by transformers: tests/data/README.md says what each field is."""
    cases: list[dict[str, Any]] = json.loads((data_dir / "smollm2_reference.json").read_text())
    return cases
