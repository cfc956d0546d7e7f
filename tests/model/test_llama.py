"""The Llama decoder on the torch backend against transformers, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig, RopeScaling
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Array, KVCacheLayout, Model, Ops
from octavo.kernels.torch.backend import TorchBackend
from octavo.model.decoder import expected_tensors, load
from octavo.model.registry import build_model
from random_model import TINY_LLAMA, MemorySource, make_step, random_source, transformers_twin, variant

BLOCK_SIZE = 4
GREEDY = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)

VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied_embeddings": False},
    "no KV sharing": {"num_kv_heads": 6},
    "one KV head": {"num_kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "odd sizes": {
        "hidden_size": 35,
        "num_heads": 5,
        "num_kv_heads": 1,
        "head_dim": 14,
        "rope_dim": 14,
        "intermediate_size": 77,
    },
    "linear RoPE": {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
    "llama3 RoPE": {
        "rope_scaling": RopeScaling(
            kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
        )
    },
}


class Spy:
    """A model that keeps the logits it handed out."""

    def __init__(self, model: Model) -> None:
        self.model, self.config, self.logits = model, model.config, torch.empty(0)

    def hidden(self, ops: Ops) -> Array:
        return self.model.hidden(ops)

    def head(self, ops: Ops, rows: Array) -> Array:
        self.logits = self.model.head(ops, rows)
        return self.logits


class Runner:
    """Sequences on a torch backend whose cache starts full of NaN, each through its own shuffled block table."""

    def __init__(self, source: MemorySource, num_seqs: int, length: int, dtype: str = "float32") -> None:
        c = source.config
        backend = TorchBackend(c, device="cpu", dtype=dtype, threads=1)
        self.spy, self.backend = Spy(load(source, backend)), backend
        blocks = -(-length // BLOCK_SIZE)
        backend.allocate_kv_cache(
            KVCacheLayout.full(
                num_layers=c.num_layers,
                num_blocks=num_seqs * blocks + 1,
                block_size=BLOCK_SIZE,
                num_kv_heads=c.num_kv_heads,
                head_dim=c.head_dim,
            )
        )
        backend._kv_caches[0].fill_(float("nan"))
        backend.bind(self.spy, max_tokens=4096, max_seqs=64)
        order = np.random.default_rng(7).permutation(num_seqs * blocks) + 1
        self.tables = order.reshape(num_seqs, blocks)

    def step(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Run (sequence, start, tokens) chunks; logits [tokens, vocab] of each."""
        step = make_step(
            [(start, tokens) for _, start, tokens in chunks],
            [self.tables[seq] for seq, _, _ in chunks],
            BLOCK_SIZE,
            all_logits=True,
        )
        self.backend.run(step, [GREEDY] * len(step.token_ids))
        return list(torch.split(self.spy.logits.clone(), [len(tokens) for _, _, tokens in chunks]))


def dense_logits(source: MemorySource, sequences: Sequence[np.ndarray]) -> list[torch.Tensor]:
    twin = transformers_twin(source)
    with torch.no_grad():
        return [twin(torch.from_numpy(tokens[None])).logits[0] for tokens in sequences]


def random_sequences(config: ModelConfig, lengths: Sequence[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, config.vocab_size, length) for length in lengths]


def check_in_chunks(source: MemorySource) -> None:
    """Logits equal transformers', computed in chunks of several sizes."""
    (tokens,) = random_sequences(source.config, [90])
    (want,) = dense_logits(source, [tokens])
    runner = Runner(source, num_seqs=1, length=90)
    cuts = [0, 1, 2, 9, 10, 47, 48, 90]
    got = [runner.step([(0, start, tokens[start:end])])[0] for start, end in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(got), want, atol=2e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_transformers_in_chunks_of_any_size(name):
    check_in_chunks(random_source(variant(**VARIANTS[name])))


@pytest.mark.slow
def test_logits_do_not_depend_on_batch_mates_or_on_what_freed_blocks_hold():
    source = random_source()
    sequences = random_sequences(source.config, [5, 33, 64, 17, 50, 2, 71])
    want = dense_logits(source, sequences)
    runner = Runner(source, num_seqs=len(sequences), length=71)
    rng, done = np.random.default_rng(11), [0] * len(sequences)
    while any(position < len(tokens) for position, tokens in zip(done, sequences, strict=True)):
        waiting = [i for i, tokens in enumerate(sequences) if done[i] < len(tokens)]
        picked = rng.choice(waiting, size=int(rng.integers(1, len(waiting) + 1)), replace=False)
        sizes = {i: int(rng.choice([1, 1, 1, 2, 7, 20])) for i in picked}
        chunks = [(int(i), done[i], sequences[i][done[i] : done[i] + sizes[i]]) for i in picked]
        chunks.sort(key=lambda chunk: len(chunk[2]) > 1)
        for (i, start, tokens), got in zip(chunks, runner.step(chunks), strict=True):
            torch.testing.assert_close(got, want[i][start : start + len(tokens)], atol=2e-4, rtol=1e-4)
            done[i] += len(tokens)


@pytest.mark.parametrize("window", [1, 5, 40])
def test_a_sliding_window_hides_what_left_it(window):
    source = random_source(variant(sliding_window=window, num_layers=1))
    (tokens,) = random_sequences(source.config, [60])
    whole = Runner(source, num_seqs=1, length=60).step([(0, 0, tokens)])[0]
    # with one layer, the last logits depend on the last ``window`` tokens alone; the others' values do not matter
    changed = tokens.copy()
    changed[: 60 - window] = (changed[: 60 - window] + 1) % source.config.vocab_size
    other = Runner(source, num_seqs=1, length=60).step([(0, 0, changed)])[0]
    torch.testing.assert_close(whole[-1], other[-1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(whole[-1 - window], other[-1 - window], atol=1e-2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype):
    source = random_source()
    (tokens,) = random_sequences(source.config, [40])
    want, got = (
        Runner(source, num_seqs=1, length=40, dtype=kind).step([(0, 0, tokens)])[0].log_softmax(-1)
        for kind in ("float32", dtype)
    )
    divergence = (want.exp() * (want - got)).sum(-1).mean().item()
    assert 0.0 < divergence < {"bfloat16": 2e-2, "float16": 5e-4}[dtype]


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones():
    config = variant(architecture="mamba")
    for refuse in (lambda: expected_tensors(config), lambda: build_model(config, {})):
        with pytest.raises(ModelFileError, match=r"'mamba'.*llama"):
            refuse()


def test_a_tensor_of_another_shape_is_named():
    source = random_source()
    source.arrays["layers.1.up.weight"] = source.arrays["layers.1.up.weight"][:-1]
    with pytest.raises(ModelFileError, match=r"layers\.1\.up\.weight has shape \(79, 48\).*\(80, 48\)"):
        load(source, TorchBackend(TINY_LLAMA, device="cpu"))


def test_an_unsupported_activation_or_rope_scaling_is_named():
    with pytest.raises(ModelFileError, match=r"'relu'.*silu, gelu"):
        load(random_source(variant(hidden_act="relu")), TorchBackend(TINY_LLAMA, device="cpu"))
    config = variant(rope_scaling=RopeScaling(kind="made up", factor=2.0))
    with pytest.raises(ModelFileError, match=r"'made up'.*linear, llama3, yarn and longrope"):
        Runner(random_source(config), num_seqs=1, length=8).step([(0, 0, [1, 2])])


@pytest.mark.parametrize("tied", [True, False])
def test_the_cost_of_a_step_counts_every_packed_weight_once(tied):
    source = random_source(variant(tied_embeddings=tied))
    torch_backend = TorchBackend(source.config, device="cpu")
    load(source, torch_backend)
    cost, c = torch_backend.model_cost(), source.config
    assert cost.weights_bytes == sum(array.nbytes for array in source.arrays.values())
    assert cost.head_macs == c.vocab_size * c.hidden_size
    assert cost.table_bytes == (0 if tied else 4 * c.vocab_size * c.hidden_size)
    matrices = sum(array.size for name, array in source.arrays.items() if array.ndim == 2 and "layers" in name)
    assert cost.float_macs == matrices


def test_a_tied_embedding_is_packed_once_for_both_uses():
    packed = []

    class Counting(TorchBackend):
        def pack(self, tensor, uses):
            packed.append((tensor.name, sorted(uses)))
            return super().pack(tensor, uses)

    source = random_source()
    load(source, Counting(TINY_LLAMA, device="cpu"))
    assert sorted(name for name, _ in packed) == sorted(source.names())
    assert ("embedding.weight", ["embedding", "head"]) in packed
