"""The reference decoding of weights against single bytes written out by hand and against a scalar version."""

import struct

import numpy as np
import pytest

from octavo.weights.codebooks import codebook, sign_patterns
from octavo.weights.dequantise import GROUP_LAYOUT, dequantise, encoded_bytes
from octavo.weights.tensor import WeightTensor
from weights.gguf_writer import PLAIN, TYPE_NUMBERS, decode_scalar

ENCODINGS = sorted(GROUP_LAYOUT)
QUANTISED = [encoding for encoding in ENCODINGS if GROUP_LAYOUT[encoding][0] > 1]


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def test_known_bytes_of_each_quantised_encoding_decode_to_known_weights() -> None:
    half, quarter = struct.pack("<e", 0.5), struct.pack("<e", -0.25)
    q8 = dequantise(as_array(half + bytes(range(126, 158))), "Q8_0", (32,))
    assert q8[:4].tolist() == [63.0, 63.5, -64.0, -63.5]
    nibbles = bytes([0x0F, 0xF0, *[0x88] * 14])
    q4 = dequantise(as_array(half + nibbles), "Q4_0", (1, 32))
    assert q4[0, [0, 1, 2, 16, 17, 18]].tolist() == [3.5, -4.0, 0.0, -4.0, 3.5, 0.0]
    q41 = dequantise(as_array(half + quarter + nibbles), "Q4_1", (32,))
    assert q41[[0, 1, 2, 16, 17, 18]].tolist() == [7.25, -0.25, 3.75, -0.25, 7.25, 3.75]


def test_known_bytes_of_each_float_encoding_decode_to_known_weights() -> None:
    assert dequantise(as_array(struct.pack("<2f", 1.5, -2.0)), "F32", (2,)).tolist() == [1.5, -2.0]
    assert dequantise(as_array(bytes.fromhex("003c00bc")), "F16", (2, 1)).tolist() == [[1.0], [-1.0]]
    assert dequantise(as_array(bytes.fromhex("803f40c0")), "BF16", (2,)).tolist() == [1.0, -3.0]


@pytest.mark.parametrize("encoding", PLAIN)
@pytest.mark.parametrize("misaligned_by", [0, 1])
def test_random_bytes_decode_as_the_scalar_version_decodes_them(encoding: str, misaligned_by: int) -> None:
    rng = np.random.default_rng(7)
    shape = (3, 4160)  # more groups than one slice of the vectorised loop
    size = encoded_bytes(encoding, shape)
    data = rng.integers(0, 256, size + misaligned_by, np.uint8)[misaligned_by:]
    if encoding not in ("BF16", "F32"):  # scales and f16 weights: any finite pattern
        width = GROUP_LAYOUT[encoding][1]
        high_bytes = (1, 3) if encoding == "Q4_1" else (1,)
        for column in high_bytes:
            data.reshape(-1, width)[:, column] &= 0b10111011
    with np.errstate(over="ignore", invalid="ignore"):  # random F32 patterns include NaN
        expected = np.array(decode_scalar(data.tobytes(), encoding)).astype(np.float32).reshape(shape)
    np.testing.assert_array_equal(dequantise(data, encoding, shape), expected)


@pytest.mark.parametrize("encoding", QUANTISED)
def test_every_block_decodes_as_the_gguf_package_decodes_it_bit_for_bit(encoding: str) -> None:
    """Random bytes: every sub-scale, index and sign, scales that are subnormal, infinite and NaN."""
    gguf = pytest.importorskip("gguf")
    weights, size = GROUP_LAYOUT[encoding]
    blocks = np.random.default_rng(3).integers(0, 256, (30_000 * 32 // weights, size), np.uint8)
    blocks[0], blocks[1] = 0, 255
    kind = gguf.GGMLQuantizationType(TYPE_NUMBERS[encoding])
    assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (encoding, (weights, size))
    with np.errstate(invalid="ignore", over="ignore"):
        ours = dequantise(blocks.reshape(-1), encoding, (len(blocks), weights))
        theirs = gguf.dequantize(blocks, kind)
    nan = np.isnan(theirs)
    assert 0 < nan.mean() < 0.1
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@pytest.mark.parametrize("encoding", QUANTISED)
def test_every_f16_scale_decodes_as_the_gguf_package_decodes_it(encoding: str) -> None:
    """All 65,536 patterns at every even byte: wherever the format keeps its scales, one of them hits."""
    gguf = pytest.importorskip("gguf")
    weights, size = GROUP_LAYOUT[encoding]
    patterns = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)[:: 1 if weights == 32 else 16]
    rng = np.random.default_rng(4)
    for at in {0, 2, size - 2, size - 4}:
        blocks = rng.integers(0, 256, (len(patterns), size), np.uint8)
        blocks[:, at : at + 2] = patterns
        with np.errstate(invalid="ignore", over="ignore"):
            ours = dequantise(blocks.reshape(-1), encoding, (len(blocks), weights))
            theirs = gguf.dequantize(blocks, gguf.GGMLQuantizationType(TYPE_NUMBERS[encoding]))
        np.testing.assert_array_equal(ours, theirs)


def test_codebooks_are_those_of_the_gguf_package() -> None:
    quants = pytest.importorskip("gguf").quants
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1"):
        theirs = getattr(quants, {"IQ1": "IQ1_S"}.get(name, name))
        theirs.init_grid()
        np.testing.assert_array_equal(codebook(name), theirs.grid[0, 0])
    signs = np.unpackbits(np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[:, None], axis=1, bitorder="little")
    np.testing.assert_array_equal(sign_patterns(), 1 - 2 * signs.astype(np.int8))


def test_a_size_that_does_not_fit_the_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 40 bytes"):
        dequantise(np.zeros(39, np.uint8), "Q4_1", (2, 32))
    with pytest.raises(ValueError, match="groups of 32 weights but a row has 48"):
        dequantise(np.zeros(60, np.uint8), "Q4_1", (2, 48))


def test_a_weight_tensor_decodes_itself() -> None:
    tensor = WeightTensor(name="x", shape=(2,), encoding="F16", data=as_array(bytes.fromhex("003c00bc")))
    assert tensor.to_float32().tolist() == [1.0, -1.0]
