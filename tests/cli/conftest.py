"""An engine without a model, for commands that drive one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.core.output import RequestOutput, Timings, Usage
from octavo.core.request import Request


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands set up logging for their process; the next test gets it as it was."""
    before = {name: logging.getLogger(name).level for name in ("", "octavo")}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


class FakeEngine:
    """Stands for an Engine: one token per sequence and step, its number as text. Prompts are their characters.

    answer: prompt token ids -> the tokens to write
    """

    def __init__(self, answer: Callable[[Sequence[int]], Sequence[int]], *, max_model_len: int = 1000) -> None:
        self.answer = answer
        self.config = ResolvedConfig(
            wish=EngineConfig(),
            model_path="/nowhere",
            model_name="fake",
            backend="torch",
            device="cpu",
            dtype="float32",
            kv_dtype="float32",
            threads=1,
            max_model_len=max_model_len,
            max_num_seqs=8,
            block_size=16,
            cache_groups=(("full", 100),),
            kv_cache_bytes=1,
            vocab_size=1 << 20,
            eos_token_ids=frozenset(),
            system_fingerprint="octavo_fake",
        )
        self.tokenizer = self.chat_template = self
        self.running: dict[str, list[Any]] = {}  # request_id -> [request, tokens still to come, tokens written]
        self.seen: list[Request] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    def encode(self, what: str | Sequence[Mapping[str, str]], *, parse_special: bool = False) -> list[int]:
        """As tokenizer: the characters. As chat template: those of every message, its role in front."""
        text = what if isinstance(what, str) else "".join(f"<{m['role']}>{m['content']}" for m in what)
        return [ord(character) for character in text]

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.seen.append(request)
            tokens = list(self.answer(request.prompt_token_ids))[: request.max_tokens]
            self.running[request.request_id] = [request, tokens, 0]

    def step(self) -> list[RequestOutput]:
        outputs = []
        for state in list(self.running.values()):
            request, tokens, _ = state
            token = tokens.pop(0)
            state[2] += 1
            outputs.append(self._output(request, f"{token} ", (token,), None if tokens else "length"))
        return outputs

    def abort(self, request_id: str) -> list[RequestOutput]:
        if request_id not in self.running:
            return []
        return [self._output(self.running[request_id][0], "", (), "abort")]

    def _output(self, request: Request, text: str, ids: tuple[int, ...], finish: Any) -> RequestOutput:
        usage = timings = None
        if finish is not None:
            _, _, written = self.running.pop(request.request_id)
            usage = Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=written, cached_tokens=3)
            timings = Timings(queue_s=0.0, ttft_s=0.25, tpot_s=0.02 if written > 1 else None, total_s=1.0)
        return RequestOutput(
            request_id=request.request_id,
            text=text,
            token_ids=ids,
            finish_reason=finish,
            usage=usage,
            timings=timings,
        )


@pytest.fixture
def fake_engine() -> type[FakeEngine]:
    return FakeEngine


@pytest.fixture
def config() -> ResolvedConfig:
    """With names that are long and look like markup."""
    return ResolvedConfig(
        wish=EngineConfig(),
        model_path="/models/a [bold] name/" + "x" * 90 + ".gguf",
        model_name="tiny",
        backend="torch",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        threads=2,
        max_model_len=2048,
        max_num_seqs=64,
        block_size=16,
        cache_groups=(("full", 1000),),
        kv_cache_bytes=3 << 29,
        vocab_size=100,
        eos_token_ids=frozenset({2}),
        system_fingerprint="octavo_0123456789ab",
        weights_bytes=98 << 20,
        notes=("first note", "second note"),
    )
