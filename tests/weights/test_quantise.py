"""Float weights packed: read back close to what they were, as close as the gguf package's own packing or closer."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.weights.dequantise import GROUP_LAYOUT, Encoding, dequantise
from octavo.weights.quantise import quantise
from weights.gguf_writer import TYPE_NUMBERS

#: encoding -> largest relative error (Frobenius) of normally distributed weights; a step of b bits costs about 2^-b
BOUNDS: dict[Encoding, float] = {
    "F16": 3e-4, "Q8_0": 6e-3, "Q4_0": 0.09, "Q4_1": 0.072, "Q5_0": 0.045, "Q5_1": 0.036, "Q4_K": 0.074, "Q5_K": 0.038,
    "Q6_K": 0.019,
}  # fmt: skip


def normal(shape: tuple[int, int]) -> np.ndarray:
    return (np.random.default_rng(1).standard_normal(shape) * 0.02).astype(np.float32)


@pytest.mark.parametrize("encoding", BOUNDS)
def test_packed_weights_are_close_to_the_weights(encoding: Encoding) -> None:
    x = normal((64, 1024))
    data = quantise(x, encoding)
    read = dequantise(data, encoding, x.shape)
    error = np.linalg.norm(read - x) / np.linalg.norm(x)
    assert error < BOUNDS[encoding]
    gguf = pytest.importorskip("gguf")
    np.testing.assert_array_equal(
        gguf.dequantize(data.reshape(64, -1), gguf.GGMLQuantizationType(TYPE_NUMBERS[encoding])), read
    )
    if encoding not in ("Q4_K", "Q5_K", "Q6_K"):  # the package packs no K-quants
        kind = gguf.GGMLQuantizationType(TYPE_NUMBERS[encoding])
        theirs = gguf.dequantize(gguf.quantize(x, kind), kind)
        assert error < 1.001 * np.linalg.norm(theirs - x) / np.linalg.norm(x)


@pytest.mark.parametrize("encoding", BOUNDS)
def test_weights_that_the_format_holds_exactly_survive(encoding: Encoding) -> None:
    """Zeros, one value for all, and all the integers of the format at a scale of 1 / 64."""
    width = GROUP_LAYOUT[encoding][0] * 2
    levels = {"Q4_0": 16, "Q4_1": 16, "Q4_K": 16, "Q5_0": 32, "Q5_1": 32, "Q5_K": 32, "Q6_K": 64}.get(encoding, 128)
    integers = np.arange(width) % levels - (0 if encoding in ("Q4_1", "Q5_1") else levels // 2)
    cases = [np.zeros(width), np.full(width, 0.75)]
    if encoding not in ("Q4_K", "Q5_K", "Q6_K", "Q8_0"):  # whose scales are searched, or no power of two
        cases.append(integers / 64)
    for values in cases:
        x = values.astype(np.float32)[None]
        np.testing.assert_allclose(dequantise(quantise(x, encoding), encoding, x.shape), x, rtol=6e-3)


@pytest.mark.parametrize("encoding", BOUNDS)
def test_what_no_block_can_hold_is_refused(encoding: Encoding) -> None:
    width = GROUP_LAYOUT[encoding][0]
    for bad in (np.nan, np.inf, -1e6):
        x = np.zeros((1, width), np.float32)
        x[0, -1] = bad
        with pytest.raises(ValueError, match=f"{encoding} cannot hold a weight that is not finite or above 65504"):
            quantise(x, encoding)
    if width > 1:
        with pytest.raises(ValueError, match="stores groups of"):
            quantise(np.zeros((1, width + 1), np.float32), encoding)


@pytest.mark.parametrize("encoding", BOUNDS)
def test_outliers_and_tiny_weights_stay_finite(encoding: Encoding) -> None:
    x = normal((8, 512))
    x[:, 7], x[1], x[2] = 60_000, 1e-30, 3e-8
    read = dequantise(quantise(x, encoding), encoding, x.shape)
    assert np.isfinite(read).all()
    assert np.abs(read[:, 7] - x[:, 7]).max() < 60_000 / 14
