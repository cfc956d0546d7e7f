"""GGUF files that are as they should be: metadata, config and weights come out as they were put in."""

import time
from pathlib import Path

import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling
from octavo.model.config_values import llama3_frequency_divisors
from octavo.model.gguf_model import GGUFFile, GGUFWeights
from octavo.model.open_model import check_complete, open_weights
from octavo.weights.dequantise import dequantise
from weights.gguf_writer import Typed, encode, llama_metadata, pack_header, random_llama, write_gguf

ENCODINGS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_out_as_they_were_written_with_q_and_k_in_rotate_half_order(
    tmp_path: Path, encoding: str, tied: bool
) -> None:
    written = random_llama(tmp_path / "m.gguf", encoding=encoding, tied=tied, biases=True)
    source = open_weights(tmp_path / "m.gguf")
    assert set(source.names()) == set(written)
    for name, values in written.items():
        tensor = source.tensor(name)
        assert tensor.encoding == (encoding if values.ndim > 1 else "F32")
        np.testing.assert_array_equal(tensor.to_float32(), values, err_msg=name)
    check_complete(source, {name: values.shape for name, values in written.items()})
    assert source.config.tied_embeddings is tied
    assert source.config.attention_bias is True


def test_the_config_is_what_the_metadata_says(tmp_path: Path) -> None:
    random_llama(tmp_path / "m.gguf", num_heads=4, num_kv_heads=2, hidden_size=96, intermediate_size=160)
    config = GGUFWeights(tmp_path / "m.gguf").config
    assert (config.architecture, config.name) == ("llama", "random llama")
    assert (config.hidden_size, config.num_layers, config.intermediate_size) == (96, 2, 160)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_dim) == (4, 2, 24, 24)
    assert (config.vocab_size, config.max_position, config.rope_theta) == (288, 256, 10_000.0)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.rope_scaling, config.attention_bias, config.tied_embeddings) == (None, False, True)


def test_only_the_rotated_dimensions_of_a_head_change_their_place(tmp_path: Path) -> None:
    random_llama(tmp_path / "m.gguf", num_heads=2, num_kv_heads=1, extra_metadata={"llama.rope.dimension_count": 4})
    source = GGUFWeights(tmp_path / "m.gguf")
    in_file = source.file.data("blk.0.attn_q.weight").view(np.float32).reshape(2, 32, 64)
    order = [0, 2, 1, 3, *range(4, 32)]  # pairs (0, 1), (2, 3) become (0, 2), (1, 3)
    expected = in_file[:, order].reshape(64, 64)
    np.testing.assert_array_equal(source.tensor("layers.0.q.weight").to_float32(), expected)


def test_every_metadata_type_is_read(tmp_path: Path) -> None:
    values: dict[str, object] = {
        "u8": Typed(0, 255), "i8": Typed(1, -128), "u16": Typed(2, 65535), "i16": Typed(3, -32768),
        "u32": Typed(4, 2**32 - 1), "i32": Typed(5, -(2**31)), "f32": Typed(6, 0.5), "bool": True,
        "text": "häß 🦜", "u64": Typed(10, 2**64 - 1), "i64": Typed(11, -(2**63)), "f64": Typed(12, 0.1),
        "strings": ["a", "", "🦜"], "numbers": [1, 2, 3], "flags": [True, False], "empty": [],
        "nested": Typed(9, [Typed(9, [1, 2]), Typed(9, ["x"])]),
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", values, {})
    read = GGUFFile(tmp_path / "m.gguf").metadata
    expected = {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}
    expected["nested"] = ((1, 2), ("x",))
    assert {key: list(v) if isinstance(v, tuple) and key != "nested" else v for key, v in read.items()} == expected
    assert read["bool"] is True


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 8), (3, 4096)])
def test_versions_and_alignments_in_use_are_read(tmp_path: Path, version: int, alignment: int) -> None:
    data = np.arange(33, dtype=np.float32)
    tensors = {"a": ("F32", (33,), encode(data, "F32")), "b": ("F16", (3, 11), encode(data, "F16"))}
    write_gguf(tmp_path / "m.gguf", {"general.alignment": alignment}, tensors, version=version)
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.data("a").ctypes.data % 8 == 0
    for name, (encoding, shape, _) in tensors.items():
        assert (file.tensors[name].encoding, file.tensors[name].shape) == (encoding, shape)
        np.testing.assert_array_equal(dequantise(file.data(name), file.tensors[name].encoding, shape).ravel(), data)


def test_arrays_stay_valid_after_close_and_new_ones_are_refused(tmp_path: Path) -> None:
    written = random_llama(tmp_path / "m.gguf")
    source = GGUFWeights(tmp_path / "m.gguf")
    early = source.tensor("embedding.weight")
    source.close()
    np.testing.assert_array_equal(early.to_float32(), written["embedding.weight"])
    with pytest.raises(ModelFileError, match="closed"):
        source.tensor("embedding.weight")


def test_weights_are_views_of_the_file_and_read_only(tmp_path: Path) -> None:
    random_llama(tmp_path / "m.gguf")
    data = GGUFWeights(tmp_path / "m.gguf").tensor("layers.0.v.weight").data
    assert not data.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


def test_the_fingerprint_tells_headers_apart(tmp_path: Path) -> None:
    prints = set()
    for i, keywords in enumerate([{}, {}, {"encoding": "Q8_0"}, {"extra_metadata": {"general.name": "other"}}]):
        random_llama(tmp_path / f"{i}.gguf", **keywords)  # type: ignore[arg-type]
        prints.add(GGUFWeights(tmp_path / f"{i}.gguf").fingerprint)
    assert len(prints) == 3


def write_with_rope_factors(path: Path, divisors: np.ndarray, **metadata: object) -> None:
    """A complete one-layer model with head_dim 64 and a tensor of frequency divisors."""
    keys = llama_metadata(num_layers=1, hidden_size=64, num_heads=1, num_kv_heads=1, intermediate_size=64)
    tensors = {
        "token_embd.weight": ("F16", (32, 64), bytes(2 * 32 * 64)),
        "rope_freqs.weight": ("F32", divisors.shape, encode(divisors, "F32")),
    }
    write_gguf(path, {**keys, "llama.rope.freq_base": 500_000.0, **metadata}, tensors)


def test_llama3_scaling_is_recognised_from_its_divisors_and_is_not_a_weight(tmp_path: Path) -> None:
    # the published definition, written out: scale by wavelength
    divisors = []
    for i in range(32):
        wavelength = 2 * np.pi * 500_000.0 ** (2 * i / 64)
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        if wavelength < 8192 / 4.0:
            divisors.append(1.0)
        elif wavelength > 8192 / 1.0:
            divisors.append(32.0)
        else:
            divisors.append(1 / ((1 - smooth) / 32.0 + smooth))
    assert any(1 < value < 32 for value in divisors)
    scaling = RopeScaling(kind="llama3", factor=32.0)
    np.testing.assert_allclose(llama3_frequency_divisors(500_000.0, 64, scaling), divisors, rtol=1e-12)
    write_with_rope_factors(tmp_path / "m.gguf", np.array(divisors, np.float32))
    source = GGUFWeights(tmp_path / "m.gguf")
    assert source.config.rope_scaling == scaling
    assert list(source.names()) == ["embedding.weight"]


def test_divisors_of_one_mean_no_scaling_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    write_with_rope_factors(tmp_path / "m.gguf", np.ones(32, np.float32))
    assert GGUFWeights(tmp_path / "m.gguf").config.rope_scaling is None
    write_with_rope_factors(tmp_path / "m.gguf", np.linspace(1, 8, 32, dtype=np.float32))
    with pytest.raises(ModelFileError, match="not those of llama 3"):
        GGUFWeights(tmp_path / "m.gguf")
    write_with_rope_factors(tmp_path / "m.gguf", np.full(32, np.nan, np.float32))
    with pytest.raises(ModelFileError, match="not those of llama 3"):
        GGUFWeights(tmp_path / "m.gguf")


def test_linear_scaling_is_read_and_a_factor_of_one_is_none(tmp_path: Path) -> None:
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    random_llama(tmp_path / "m.gguf", extra_metadata=linear)
    assert GGUFWeights(tmp_path / "m.gguf").config.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    random_llama(tmp_path / "m.gguf", extra_metadata={**linear, "llama.rope.scaling.factor": 1.0})
    assert GGUFWeights(tmp_path / "m.gguf").config.rope_scaling is None


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "rwkv6", "'rwkv6'; supported are cohere2, .*llama, "),
        ("general.architecture", 3, "general.architecture is 3 but must be a string"),
        ("split.count", Typed(2, 3), "to find the others it must be called"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.factor is missing"),
        ("llama.expert_count", 8, "expert_count is 8, which changes the model"),
        ("llama.attention.sliding_window", 4096, "sliding_window is 4096"),
        ("llama.something_new", 1, "something_new is 1"),
        ("llama.block_count", 0, "block_count is 0 but must be a whole number from 1"),
        ("llama.block_count", 2**32 - 1, "block_count is 4294967295"),
        ("llama.context_length", Typed(10, 2**63), "context_length is 9223372036854775808"),
        ("llama.attention.head_count", [4, 4], "head_count is a tuple of 2 but must be a whole number"),
        ("llama.attention.head_count_kv", 3, "4 query heads cannot share 3 KV heads"),
        ("llama.attention.head_count_kv", 8, "head_count_kv is 8 but must be a whole number from 1 to 4"),
        ("llama.attention.key_length", 8, "16 rotary dimensions must be .* at most head_dim 8"),
        ("llama.attention.value_length", 8, "attention.value_length differs from the length of keys"),
        ("llama.rope.dimension_count", 15, "15 rotary dimensions must be an even number"),
        ("llama.rope.dimension_count", 18, "at most head_dim 16"),
        ("llama.rope.freq_base", float("nan"), "freq_base is nan but must be a number above 0"),
        ("llama.rope.freq_base", float("inf"), "freq_base is inf"),
        ("llama.attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon is 0.0"),
        ("tokenizer.ggml.tokens", ["a", "b"], "has 2 tokens but token_embd.weight has 288 rows"),
    ],
)
def test_a_config_that_octavo_cannot_run_is_refused_by_name(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    random_llama(tmp_path / "m.gguf", extra_metadata={key: value})
    with pytest.raises(ModelFileError, match=message):
        GGUFWeights(tmp_path / "m.gguf")


@pytest.mark.parametrize("key", ["embedding_length", "block_count", "attention.layer_norm_rms_epsilon"])
def test_a_key_that_is_needed_is_named_when_it_is_missing(tmp_path: Path, key: str) -> None:
    keys = llama_metadata(num_layers=1, hidden_size=32, num_heads=1, num_kv_heads=1, intermediate_size=32)
    del keys[f"llama.{key}"]
    write_gguf(tmp_path / "m.gguf", keys, {"token_embd.weight": ("F32", (4, 32), bytes(512))})
    with pytest.raises(ModelFileError, match=f"{key} is missing"):
        GGUFWeights(tmp_path / "m.gguf")


def test_missing_extra_and_mis_shaped_tensors_are_all_named(tmp_path: Path) -> None:
    written = random_llama(tmp_path / "m.gguf", num_layers=1)
    source = open_weights(tmp_path / "m.gguf")
    expected = {name: values.shape for name, values in written.items()}
    check_complete(source, expected)
    shape = expected.pop("layers.0.v.weight")
    expected |= {"layers.0.q.weight": (64, 32), "head.weight": (288, 64)}
    with pytest.raises(ModelFileError) as caught:
        check_complete(source, expected)
    for part in (
        "head.weight (288, 64) is missing",
        "layers.0.v.weight is not part of this model",
        "layers.0.q.weight is (64, 64) but must be (64, 32)",
    ):
        assert part in str(caught.value)
    assert shape == (32, 64)
    with pytest.raises(ModelFileError, match=r"and 4 more$"):
        check_complete(source, dict.fromkeys(written, (1,)) | {"foo": (1,)})


def test_a_tensor_that_the_architecture_does_not_know_keeps_its_own_name(tmp_path: Path) -> None:
    keys = llama_metadata(num_layers=1, hidden_size=32, num_heads=1, num_kv_heads=1, intermediate_size=32)
    blank = ("F32", (4, 32), bytes(512))
    write_gguf(
        tmp_path / "m.gguf", keys, {"token_embd.weight": blank, "blk.0.ffn_gate_inp.weight": blank, "odd": blank}
    )
    assert set(GGUFWeights(tmp_path / "m.gguf").names()) == {"embedding.weight", "blk.0.ffn_gate_inp.weight", "odd"}
    write_gguf(tmp_path / "m.gguf", keys, {"token_embd.weight": blank, "embedding.weight": blank})
    with pytest.raises(ModelFileError, match=r"are both 'embedding\.weight'"):
        GGUFWeights(tmp_path / "m.gguf")


def test_a_path_is_opened_by_what_it_holds(tmp_path: Path) -> None:
    random_llama(tmp_path / "m.gguf")
    assert open_weights(tmp_path).config == open_weights(str(tmp_path / "m.gguf")).config
    (tmp_path / "m.gguf").rename(tmp_path / "no-suffix.bin")
    assert isinstance(open_weights(tmp_path / "no-suffix.bin"), GGUFWeights)
    cases = {
        tmp_path / "gone": "there is no file or folder",
        tmp_path: "neither a config.json nor a .gguf file",
    }
    for path, message in cases.items():
        with pytest.raises(ModelFileError, match=message):
            open_weights(path)
    (tmp_path / "model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelFileError, match="is a pickle"):
        open_weights(tmp_path / "model.bin")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(pack_header(0, 0))
    with pytest.raises(ModelFileError, match=r"holds 2 GGUF files \(a.gguf, b.gguf\); name one"):
        open_weights(tmp_path)


@pytest.mark.slow
def test_the_default_model_opens_in_a_quarter_of_a_second_with_the_config_of_smollm2(model_path: Path) -> None:
    best = 1e9
    for _ in range(3):
        started = time.process_time()
        source = GGUFWeights(model_path)
        best = min(best, time.process_time() - started)
        source.close()
    assert best < 0.25
    config = source.config
    assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.vocab_size, config.max_position, config.rope_theta) == (49152, 8192, 100_000.0)
    assert sum(1 for _ in source.names()) == 272
