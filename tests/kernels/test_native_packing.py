"""Packed weights: unpack(pack(t)) is the reference dequantisation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from native_models import ISAS, QUANTISED, backend, config, random_tensor, whole

from octavo import _native
from octavo.core.errors import ConfigError
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding
from octavo.weights.tensor import WeightTensor


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("encoding", GROUP_LAYOUT)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (35, 96), (19, 768)])
def test_unpacking_gives_back_the_dequantised_tensor(shape: tuple[int, int], encoding: Encoding, isa: str) -> None:
    made = backend(config(), isa)
    shape = (shape[0], whole(encoding, shape[1]))
    tensor = random_tensor(np.random.default_rng(1), shape, encoding)
    packed = made.pack(tensor, frozenset({"linear"}))
    np.testing.assert_array_equal(made.unpack(packed), tensor.to_float32())
    told = made.weight_bytes(shape, encoding, frozenset({"linear"})).packed
    assert told <= packed.num_bytes <= told + 64


@pytest.mark.parametrize("encoding", QUANTISED)
def test_every_bit_pattern_of_a_block_survives(encoding: Encoding) -> None:
    """Random bytes: scales that are negative, subnormal, infinite or NaN, every sub-scale and integer."""
    weights, size = GROUP_LAYOUT[encoding]
    data = np.random.default_rng(2).integers(0, 256, (3000, size), np.uint8).reshape(-1)
    tensor = WeightTensor(name="w", shape=(3000, weights), encoding=encoding, data=data)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = tensor.to_float32()
    for isa in ISAS:
        made = backend(config(), isa)
        with np.errstate(invalid="ignore"):
            unpacked = made.unpack(made.pack(tensor, frozenset({"linear"})))
        np.testing.assert_array_equal(unpacked, wanted)
        signs = encoding != "Q4_0" and ~np.isnan(wanted)  # an 8 of Q4_0 may be -0 or 0
        np.testing.assert_array_equal(np.signbit(unpacked) & signs, np.signbit(wanted) & signs)


@pytest.mark.parametrize("encoding", GROUP_LAYOUT)
def test_large_matrices_are_packed_in_slices(encoding: Encoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.kernels.native.backend._REPACKED_AT_ONCE", 1)
    monkeypatch.setattr("octavo.kernels.native.backend._FILE_PAGES", 20 * 512)
    made = backend(config())
    tensor = random_tensor(np.random.default_rng(1), (67, 512), encoding)
    np.testing.assert_array_equal(made.unpack(made.pack(tensor, frozenset({"linear"}))), tensor.to_float32())


def test_a_matrix_is_filled_by_whole_panels_only() -> None:
    made = backend(config())
    matrix = _native.allocate("Q8_0", 40, 32)
    for first_row, rows in ((0, 8), (8, 16), (48, 8), (-16, 16), (32, 16), (0, 41)):
        with pytest.raises(ValueError, match="are not whole panels of a Q8_0 matrix of 40 x 32"):
            matrix.fill(made._context, first_row, np.zeros(rows * 34, np.uint8))
    with pytest.raises(ValueError, match="are not whole panels"):
        matrix.fill(made._context, 0, np.zeros(33, np.uint8))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("encoding", ["Q8_0", "Q4_0", "Q4_1"])
def test_every_bit_pattern_of_a_scale_survives(encoding: Encoding, isa: str) -> None:
    """Subnormal f16 scales too: half of all model files have some."""
    made = backend(config(), isa)
    rng = np.random.default_rng(2)
    finite = np.arange(1 << 16, dtype=np.uint16)
    finite = finite[(finite & 0x7C00) != 0x7C00]
    tensor = random_tensor(rng, (len(finite), 32), encoding)
    groups = tensor.data.reshape(len(finite), -1)
    groups[:, :2] = finite.view(np.uint8).reshape(-1, 2)
    if encoding == "Q4_1":
        groups[:, 2:4] = rng.permutation(finite).view(np.uint8).reshape(-1, 2)
    np.testing.assert_array_equal(made.unpack(made.pack(tensor, frozenset({"linear"}))), tensor.to_float32())


def test_sizes_that_do_not_fit_are_refused_by_name() -> None:
    made = backend(config())
    short = WeightTensor(name="layers.0.q.weight", shape=(4, 32), encoding="Q8_0", data=np.zeros(100, np.uint8))
    with pytest.raises(ConfigError, match=r"layers\.0\.q\.weight: Q8_0 matrix of 4 x 32 takes 136 bytes, got 100"):
        made.pack(short, frozenset({"linear"}))
    odd = WeightTensor(name="w", shape=(4, 33), encoding="Q4_0", data=np.zeros(100, np.uint8))
    with pytest.raises(ConfigError, match="multiple of 32"):
        made.pack(odd, frozenset({"linear"}))
