"""Servers around the fake engine: one per module, or one of a test's own. Tiny models for the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from live_server import LiveServer, running_server

from weights.gguf_writer import random_llama, sentencepiece_metadata


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LiveServer]:
    with running_server() as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def server(shared_server: LiveServer) -> LiveServer:
    shared_server.engine.reset()
    return shared_server


@pytest.fixture
def start_server() -> Callable[..., AbstractContextManager[LiveServer]]:
    return running_server


@pytest.fixture(scope="session")
def byte_level_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with byte-level BPE."""
    path = tmp_path_factory.mktemp("model") / "byte_level.gguf"
    random_llama(path, seed=3)
    return path


@pytest.fixture(scope="session")
def sentencepiece_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a SentencePiece tokenizer, which writes BOS."""
    path = tmp_path_factory.mktemp("model") / "sentencepiece.gguf"
    random_llama(path, seed=3, vocab_size=288, extra_metadata=sentencepiece_metadata(288))
    return path
