"""Packed weights: unpack(pack(t)) is the reference dequantisation, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from native_models import ENCODINGS, ISAS, backend, config, random_tensor

from octavo.core.errors import ConfigError
from octavo.weights.dequantise import Encoding
from octavo.weights.tensor import WeightTensor


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", [(1, 32), (16, 64), (35, 96)])
def test_unpacking_gives_back_the_dequantised_tensor(shape: tuple[int, int], encoding: Encoding, isa: str) -> None:
    made = backend(config(), isa)
    tensor = random_tensor(np.random.default_rng(1), shape, encoding)
    packed = made.pack(tensor, frozenset({"linear"}))
    np.testing.assert_array_equal(made.unpack(packed), tensor.to_float32())


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
