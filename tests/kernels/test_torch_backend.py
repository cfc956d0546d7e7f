"""The torch backend's own duties: paged attention, cache writes, copies, slices, errors."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import select
from octavo.kernels.base import KVCacheLayout, ModelInput
from octavo.kernels.reference.rope import inverse_frequencies
from octavo.kernels.torch import attention, backend
from octavo.kernels.torch.backend import TorchBackend
from octavo.kernels.torch.ops import TorchOps, layer_planes
from octavo.weights.tensor import WeightTensor

BLOCK = 4
NUM_BLOCKS = 256
LAYOUT = KVCacheLayout.full(num_layers=2, num_blocks=NUM_BLOCKS, block_size=BLOCK, num_kv_heads=2, head_dim=8)
CONFIG = ModelConfig(
    architecture="llama",
    name="none",
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=50,
    max_position=4096,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    rope_dim=8,
    tied_embeddings=True,
)


def step_of(
    chunks: list[tuple[int, int]],
    slots: np.ndarray | None = None,
    token_ids: Iterable[int] | None = None,
    copies: Sequence[Sequence[int]] = (),
) -> ModelInput:
    """Chunks (start, length), one per sequence, over consecutive shuffled blocks."""
    order, tables = np.random.default_rng(5).permutation(NUM_BLOCKS), []
    width = max(-(-(start + length) // BLOCK) for start, length in chunks)
    for _ in chunks:
        tables.append(order[:width])
        order = order[width:]
    positions = np.concatenate([np.arange(start, start + length) for start, length in chunks])
    seqs = np.repeat(np.arange(len(chunks)), [length for _, length in chunks])
    blocks = np.stack(tables)
    if slots is None:
        slots = blocks[seqs, positions // BLOCK] * BLOCK + positions % BLOCK
    return ModelInput.of(
        token_ids=[0] * len(positions) if token_ids is None else token_ids,
        positions=positions,
        slot_mapping=slots,
        logit_rows=range(len(positions)),
        query_starts=np.cumsum([0] + [length for _, length in chunks]),
        context_lens=[start + length for start, length in chunks],
        block_tables=list(blocks),
        copies=copies,
    )


def ops_for(step: ModelInput, cache: torch.Tensor, config: ModelConfig = CONFIG) -> TorchOps:
    return TorchOps(step, layer_planes([cache], LAYOUT.groups), LAYOUT, {}, "cpu")


def empty_cache() -> torch.Tensor:
    shape = (2, 2, NUM_BLOCKS, BLOCK, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    return torch.full(shape, math.nan)


def dense_attention(q, keys, values, positions, scale, window, soft_cap):
    """q [t, H, D] over keys, values [L, H_kv, D], one query and head at a time, float64."""
    out = np.zeros(q.shape)
    per_kv = q.shape[1] // keys.shape[1]
    for i, position in enumerate(positions):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            k, v = keys[first : position + 1, head // per_kv], values[first : position + 1, head // per_kv]
            scores = k @ q[i, head] * scale
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v / weights.sum()
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("window", [None, 1, 3, 9, 1000])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("limits", [(256, 1 << 17), (3, 40)], ids=["whole", "cut small"])
def test_paged_attention_equals_dense_attention(monkeypatch, window, soft_cap, limits):
    monkeypatch.setattr(attention, "QUERY_TILE", limits[0])
    monkeypatch.setattr(attention, "MAX_GATHER_ROWS", limits[1])
    chunks = [(4, 1), (29, 1), (0, 1), (26, 1), (11, 1), (12, 17), (0, 7)]
    step, cache, rng = step_of(chunks), empty_cache(), np.random.default_rng(1)
    q = rng.standard_normal((len(step.token_ids), 6, 8))
    want = []
    for seq, (start, length) in enumerate(chunks):
        end = start + length
        kv = rng.standard_normal((2, end, 2, 8)).astype(np.float32)
        for position in range(end):  # everything but these positions stays NaN
            cache[1, :, step.block_tables[0, seq, position // BLOCK], position % BLOCK] = torch.from_numpy(
                kv[:, position]
            )
        rows = q[step.query_starts[seq] : step.query_starts[seq + 1]]
        want.append(dense_attention(rows, kv[0], kv[1], range(start, end), 0.3, window, soft_cap))
    queries = torch.from_numpy(q.reshape(len(q), -1).astype(np.float32))
    got = ops_for(step, cache).paged_attention(1, queries, scale=0.3, window=window, soft_cap=soft_cap)
    np.testing.assert_allclose(got.numpy(), np.concatenate(want), atol=2e-5)


def test_a_long_sequence_does_not_pad_the_short_ones():
    step = step_of([(89, 1), *[(7, 1)] * 8])
    groups = attention.plan_groups(step, step.block_tables[0], BLOCK, 2, None, "cpu")
    assert [group.num_seqs for group in groups] == [1, 8]
    assert [group.kv_rows.numel() for group in groups] == [2 * 90, 2 * 8 * 8]


def test_kv_is_written_at_the_slots_and_slot_minus_one_writes_nothing():
    slots = np.array([5, -1, 17, -1])
    step, cache = step_of([(0, 4)], slots), empty_cache()
    k, v = torch.arange(64.0).view(4, 16), torch.arange(64.0).view(4, 16) + 100
    ops_for(step, cache).write_kv(1, k, v)
    flat = cache.view(2, 2, -1, 16)
    assert torch.equal(flat[1, 0, 5], k[0])
    assert torch.equal(flat[1, 1, 17], v[2])
    written = ~flat.isnan().all(-1)
    assert written.nonzero().tolist() == [[1, 0, 5], [1, 0, 17], [1, 1, 5], [1, 1, 17]]


@pytest.mark.parametrize("rope_dim", [8, 4])
def test_rope_turns_pairs_of_the_leading_dimensions(rope_dim):
    config = replace(CONFIG, rope_dim=rope_dim)
    step = step_of([(100, 1), (0, 5)])
    x = np.random.default_rng(0).standard_normal((6, 3, 8))
    want, half = x.copy(), rope_dim // 2
    for row, position in enumerate(step.positions):
        for pair, frequency in enumerate(inverse_frequencies(config.ropes[0])):
            turn = np.exp(1j * position * frequency)
            turned = (x[row, :, pair] + 1j * x[row, :, pair + half]) * turn
            want[row, :, pair], want[row, :, pair + half] = turned.real, turned.imag
    ops = ops_for(step, empty_cache(), config)
    got = ops.rope(torch.from_numpy(x.reshape(6, 24).astype(np.float32)), ops.positions, 3, config.ropes[0])
    np.testing.assert_allclose(got.numpy(), want.reshape(6, 24), atol=1e-5)


def test_elementwise_ops_follow_their_formulas():
    ops, rng = ops_for(step_of([(0, 3)]), empty_cache()), np.random.default_rng(0)
    x, y, gain = rng.standard_normal((3, 16)), rng.standard_normal((3, 16)), rng.standard_normal(16)
    a, b, g = (torch.from_numpy(array.astype(np.float32)) for array in (x, y, gain))
    norm = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * gain
    gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) * y
    head = rng.standard_normal((50, 16)).astype(np.float32)
    for got, want in [
        (ops.rms_norm(a, g, 1e-5), norm),
        (ops.gated_mul(a, b, "silu"), x / (1 + np.exp(-x)) * y),
        (ops.gated_mul(a, b, "gelu"), gelu),
        (ops.add(a, b), x + y),
        (ops.scale(a, 2.5), 2.5 * x),
        (ops.linear(a, torch.from_numpy(head), torch.ones(50)), x @ head.T + 1),
        (ops.logits(a, torch.from_numpy(head), 3.0), 3 * np.tanh(x @ head.T / 3)),
        (ops.select_logit_rows(a), x),
    ]:
        np.testing.assert_allclose(got.numpy(), want, atol=1e-5)


class EchoModel:
    """Logits are the token's embedding row: shows rows, slices and failures without a decoder."""

    def __init__(self, table: torch.Tensor) -> None:
        self.config, self.table, self.sizes = CONFIG, table, []

    def hidden(self, ops):
        return ops.select_logit_rows(ops.embedding(self.table, ops.token_ids))

    def head(self, ops, rows):
        self.sizes.append(len(rows))
        return rows.clone()


def echo_backend(table: torch.Tensor) -> tuple[TorchBackend, EchoModel]:
    torch_backend, model = TorchBackend(CONFIG, device="cpu"), EchoModel(table)
    torch_backend.allocate_kv_cache(LAYOUT)
    torch_backend.bind(model, max_tokens=64, max_seqs=16)
    return torch_backend, model


def test_block_copies_run_in_every_layer_and_take_only_the_head_of_the_block():
    torch_backend, _ = echo_backend(torch.zeros(50, 50))
    (cache,) = torch_backend._kv_caches
    cache.copy_(torch.arange(cache.numel()).view_as(cache))
    before = cache.clone()
    step = step_of([(0, 1)], copies=[[0, 3, 9, 2], [0, 4, 1, 4]])
    torch_backend.run(step, [DrawRule(params=SamplingParams(), random_stream=0)])
    want = before.clone()
    want[:, :, 9, :2], want[:, :, 1] = before[:, :, 3, :2], before[:, :, 4]
    assert torch.equal(cache, want)


def test_prompt_logprobs_run_in_slices_and_equal_those_of_one_piece(monkeypatch):
    table = torch.randn(50, 50, generator=torch.Generator().manual_seed(1))
    torch_backend, model = echo_backend(table)
    step = step_of([(0, 30)], token_ids=range(30))
    draws = [DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)]
    targets = [(token, token % 3) for token in range(29)]
    whole = torch_backend.run(step, draws, targets)
    monkeypatch.setattr(backend, "TARGET_SLICE_BYTES", 4 * 50 * 7)
    model.sizes.clear()
    assert torch_backend.run(step, draws, targets).row_logprobs == whole.row_logprobs
    assert model.sizes == [1, 7, 7, 7, 7, 1]
    logprobs = table[5].log_softmax(0)
    token = whole.row_logprobs[4]
    assert token.logprob == pytest.approx(logprobs[4].item(), abs=1e-5)
    assert [i for i, _ in token.top] == logprobs.topk(1).indices.tolist()


def test_a_row_that_is_not_finite_fails_its_own_draw_alone():
    table = torch.zeros(50, 50)
    table[7, 3] = math.nan
    torch_backend, _ = echo_backend(table)
    step = step_of([(0, 3)], token_ids=[1, 7, 2])
    draws = [DrawRule(params=SamplingParams(temperature=t), random_stream=0) for t in (0.0, 1.0, 1.0)]
    tokens = torch_backend.run(step, draws).tokens
    assert [token if isinstance(token, str) else "" for token in tokens] == ["", "not_finite", ""]


def test_packing_dequantises_once_and_keeps_norms_in_float32():
    array = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    tensor = WeightTensor(name="w", shape=(3, 4), encoding="F32", data=array.reshape(-1).view(np.uint8))
    torch_backend = TorchBackend(CONFIG, device="cpu", dtype="bfloat16")
    assert torch_backend.pack(tensor, frozenset({"linear"})).dtype == torch.bfloat16
    norm = torch_backend.pack(tensor, frozenset({"norm"}))
    assert norm.dtype == torch.float32
    assert np.array_equal(norm.numpy(), array)


def test_the_cache_has_the_size_that_kv_bytes_per_token_says():
    for dtype in ("float32", "bfloat16"):
        torch_backend = TorchBackend(CONFIG, device="cpu", dtype=dtype)
        tokens = NUM_BLOCKS * BLOCK
        assert torch_backend.allocate_kv_cache(LAYOUT) == tokens * torch_backend.kv_bytes_per_token(
            CONFIG, CONFIG.num_layers
        )


def test_a_cache_that_does_not_fit_says_what_to_lower():
    huge = KVCacheLayout.full(num_layers=80, num_blocks=1 << 40, block_size=16, num_kv_heads=8, head_dim=128)
    with pytest.raises(ConfigError, match="does not fit on cpu; lower --kv-cache-memory"):
        TorchBackend(CONFIG, device="cpu").allocate_kv_cache(huge)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"device is 'cuda'.*--device auto"):
        TorchBackend(CONFIG, device="cuda")


def test_auto_is_float32_on_the_cpu_and_threads_are_honoured_in_any_thread():
    before = torch.get_num_threads()
    try:
        torch_backend = TorchBackend(CONFIG, device="cpu", threads=1)
        assert torch_backend.dtype == torch_backend.kv_dtype == "float32"
        seen: list[int] = []
        worker = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        worker.start()
        worker.join()
        assert seen == [1]
    finally:
        torch.set_num_threads(before)


def test_without_torch_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(select, "_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"pip install 'octavo\[torch\]'"):
        select.create_backend(EngineConfig(), CONFIG, num_cores=1)
    with pytest.raises(ConfigError, match="no native kernels"):
        select.create_backend(EngineConfig(backend="native"), CONFIG, num_cores=1)


def test_auto_prefers_native_on_the_cpu_only(monkeypatch):
    monkeypatch.setattr(select, "_installed", lambda module: True)
    assert select.resolve_backend(EngineConfig()) == "native"
    assert select.resolve_backend(EngineConfig(device="mps")) == "torch"
    assert select.resolve_backend(EngineConfig(backend="torch")) == "torch"
    with pytest.raises(ConfigError, match="native backend runs on the CPU"):
        select.create_backend(EngineConfig(backend="native", device="cuda"), CONFIG, num_cores=1)


def test_create_backend_makes_the_torch_backend_as_wished():
    before = torch.get_num_threads()
    wish = EngineConfig(backend="torch", device="cpu", dtype="bfloat16", threads=1)
    try:
        made = select.create_backend(wish, CONFIG, num_cores=before)
        assert (made.name, made.device, made.dtype, torch.get_num_threads()) == ("torch", "cpu", "bfloat16", 1)
    finally:
        torch.set_num_threads(before)
