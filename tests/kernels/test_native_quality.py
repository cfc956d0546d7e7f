"""Speed must not cost quality: KL divergence of the next token against the same weights in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from native_models import allocate
from native_steps import Seq, step_input
from numpy.typing import NDArray

from octavo.core.model_config import ModelConfig
from octavo.kernels.native.backend import Activations, NativeBackend
from octavo.model import decoder
from octavo.model.gguf_model import GGUFWeights
from octavo.model.open_model import open_weights
from octavo.model.weight_source import WeightSource
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tensor import WeightTensor

SLICE = 64  # rows of logits that a program keeps
WINDOW = 384  # tokens of text per sequence


class _Float32(WeightSource):
    """The same weights, dequantised."""

    def __init__(self, source: WeightSource) -> None:
        self.config: ModelConfig = source.config
        self.fingerprint = source.fingerprint
        self._source = source

    def names(self) -> list[str]:
        return list(self._source.names())

    def tensor(self, name: str) -> WeightTensor:
        stored = self._source.tensor(name)
        data = np.ascontiguousarray(stored.to_float32()).reshape(-1).view(np.uint8)
        return WeightTensor(name=name, shape=stored.shape, encoding="F32", data=data)

    def close(self) -> None:
        self._source.close()


def _backend(source: WeightSource, kv_dtype: str, activations: Activations) -> NativeBackend:
    made = NativeBackend(source.config, kv_dtype=kv_dtype, activations=activations)
    model = decoder.load(source, made)
    allocate(made, source.config, num_blocks=64)
    made.bind(model, max_tokens=SLICE, max_seqs=1)
    return made


def _log_probs(made: NativeBackend, tokens: list[int]) -> Iterator[NDArray[np.float64]]:
    """Log-softmax after each token, SLICE rows at a time: [rows, vocab]."""
    seq = Seq(tokens, list(range(64)))
    while seq.computed < len(tokens):
        n = min(SLICE, len(tokens) - seq.computed)
        made.run(step_input([(seq, n)], 16, logit_rows=range(n)), [], [(0, 0)] * n)
        seq.computed += n
        logits = made._built.program.read(made._built.logits, n).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        yield logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@pytest.mark.slow
def test_rounded_activations_and_bfloat16_kv_stay_close_to_float32(model_path: Path, data_dir: Path) -> None:
    """Mean KL(float32 || numerics) below 5e-3 with int8 activations, below 1e-3 with bfloat16 ones, over the reference
    texts and a few thousand tokens more.
    """
    source = open_weights(model_path)
    assert isinstance(source, GGUFWeights)
    text = (data_dir / "kl_text.txt").read_text()
    tokens = Tokenizer.from_gguf(source.file.metadata).encode(text)
    cases = [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]
    reference = json.loads((data_dir / "smollm2_reference.json").read_text())
    cases += [case["prompt_token_ids"] + case["greedy_token_ids"] for case in reference]
    truth = _backend(_Float32(source), "float32", "int8")
    bounds: dict[Activations, float] = {"int8": 5e-3, "bf16": 1e-3}
    rounded = {activations: _backend(source, "auto", activations) for activations in bounds}
    divergences: dict[Activations, list[NDArray[np.float64]]] = {activations: [] for activations in bounds}
    for case in cases:
        results = zip(_log_probs(truth, case), *(_log_probs(rounded[a], case) for a in bounds), strict=True)
        for p, *others in results:
            for activations, q in zip(bounds, others, strict=True):
                divergences[activations].append(np.sum(np.exp(p) * (p - q), axis=1))
    for activations, bound in bounds.items():
        every = np.concatenate(divergences[activations])
        assert len(every) > 2500
        assert every.mean() < bound
        assert every.min() > -1e-6
        print(f"{activations} activations: mean KL {every.mean():.2e}")
