"""Model folders in Hugging Face's layout: config.json and safetensors, and the ways in which they can lie."""

import json
import os
import re
import time
import tracemalloc
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling
from octavo.model.architectures.llama import Llama
from octavo.model.hf_model import HFFolderWeights
from octavo.model.open_model import check_complete, open_weights
from octavo.weights.safetensors import SafetensorsFile

CONFIG: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}


def random_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {
        "model.embed_tokens.weight": (40, 32),
        "model.norm.weight": (32,),
        "model.layers.0.input_layernorm.weight": (32,),
        "model.layers.0.post_attention_layernorm.weight": (32,),
        "model.layers.0.self_attn.q_proj.weight": (32, 32),
        "model.layers.0.self_attn.k_proj.weight": (16, 32),
        "model.layers.0.self_attn.v_proj.weight": (16, 32),
        "model.layers.0.self_attn.o_proj.weight": (32, 32),
        "model.layers.0.mlp.gate_proj.weight": (48, 32),
        "model.layers.0.mlp.up_proj.weight": (48, 32),
        "model.layers.0.mlp.down_proj.weight": (32, 48),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: object) -> None:
    folder.mkdir(exist_ok=True)
    fields = {key: value for key, value in {**CONFIG, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(fields))


def write_folder(folder: Path, **changes: object) -> dict[str, np.ndarray]:
    write_config(folder, **changes)
    tensors = random_tensors()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def write_sharded(folder: Path, weight_map: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """Two shards; ``weight_map`` replaces what the index says."""
    write_config(folder)
    tensors = random_tensors()
    names = list(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    placed = {name: shard for shard, members in shards.items() for name in members}
    index = {"metadata": {"total_size": 1}, "weight_map": placed if weight_map is None else weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def assert_same(source: HFFolderWeights, tensors: dict[str, np.ndarray]) -> None:
    assert set(source.names()) == {Llama.names.from_hf(name) for name in tensors}
    for name, values in tensors.items():
        np.testing.assert_array_equal(source.tensor(Llama.names.from_hf(name)).to_float32(), values, err_msg=name)
        assert source.shape(Llama.names.from_hf(name)) == values.shape


def test_a_single_file_a_sharded_folder_and_a_file_path_hold_the_same_weights(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path / "single")
    single = open_weights(tmp_path / "single")
    assert isinstance(single, HFFolderWeights)
    assert_same(single, tensors)
    check_complete(single, {Llama.names.from_hf(name): values.shape for name, values in tensors.items()})
    sharded = HFFolderWeights(tmp_path / "sharded") if write_sharded(tmp_path / "sharded") else None
    assert sharded is not None
    assert_same(sharded, tensors)
    by_file = open_weights(tmp_path / "single" / "model.safetensors")
    assert by_file.config == single.config
    assert by_file.fingerprint == single.fingerprint != sharded.fingerprint


def test_every_float_type_is_read_bit_for_bit(tmp_path: Path) -> None:
    raw = {"F32": bytes(range(64)), "F16": bytes(range(32)), "BF16": bytes(range(32, 64))}
    entries, blob = {}, b""
    for dtype, data in raw.items():
        shape = [4, 4] if dtype == "F32" else [2, 8]
        entries[dtype] = {"dtype": dtype, "shape": shape, "data_offsets": [len(blob), len(blob) + len(data)]}
        blob += data
    (tmp_path / "m.safetensors").write_bytes(pack(entries, blob))
    file = SafetensorsFile(tmp_path / "m.safetensors")
    for dtype, data in raw.items():
        assert file.tensors[dtype].encoding == dtype
        assert file.data(dtype).tobytes() == data


def test_the_config_is_what_config_json_says(tmp_path: Path) -> None:
    write_folder(tmp_path)
    config = HFFolderWeights(tmp_path).config
    assert (config.architecture, config.hidden_size, config.intermediate_size) == ("llama", 32, 48)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 4, 2, 8)
    assert (config.vocab_size, config.max_position, config.rope_theta, config.rope_dim) == (40, 128, 5000.0, 8)
    assert (config.tied_embeddings, config.attention_bias, config.mlp_bias) == (True, False, False)
    assert (config.rms_norm_eps, config.hidden_act, config.rope_scaling) == (1e-5, "silu", None)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": ...}, 10_000.0, None),
        ({"rope_scaling": None}, 5000.0, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 5000.0, RopeScaling(kind="linear", factor=2.0)),
        ({"rope_theta": ..., "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}, 9.0, None),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            5000.0,
            RopeScaling(kind="llama3", factor=32.0),
        ),
    ],
)
def test_rotary_settings_are_read_in_their_old_and_new_places(
    tmp_path: Path, changes: dict[str, object], theta: float, scaling: RopeScaling | None
) -> None:
    write_folder(tmp_path, **changes)
    config = HFFolderWeights(tmp_path).config
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba'; supported are cohere2, .*llama, "),
        ({"model_type": ...}, "model_type is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is set: only unquantised"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is set: this model runs code"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; supported are silu"),
        ({"rope_scaling": {"rope_type": "made up", "factor": 4.0}}, "rope_type is 'made up'; supported are default"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "wave": 1}}, "wave is 1, which changes the model"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1, 0]}}, "long_factor must be a list of numbers"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling is a list but must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is '32' but must be a whole number"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0 but must be a whole number"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000 but must be .* to 4096"),
        ({"max_position_embeddings": 10**12}, "max_position_embeddings is 1000000000000"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
        ({"head_dim": 7}, "7 rotary dimensions must be an even number"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1 but must be true or false"),
    ],
)
def test_a_config_that_octavo_cannot_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    write_folder(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=message):
        HFFolderWeights(tmp_path)


def test_buffers_that_are_no_weights_are_left_out_and_other_extras_are_named(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    expected = {Llama.names.from_hf(name): values.shape for name, values in tensors.items()}
    frequencies = {
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    save_file(tensors | frequencies, tmp_path / "model.safetensors")
    check_complete(HFFolderWeights(tmp_path), expected)
    save_file(tensors | {"model.layers.0.adapter": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"model\.layers\.0\.adapter is not part of this model"):
        check_complete(HFFolderWeights(tmp_path), expected)


def test_a_second_copy_of_a_tied_head_is_left_out_only_if_it_is_one(tmp_path: Path) -> None:
    tensors = write_folder(tmp_path)
    head = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": head.copy()}, tmp_path / "model.safetensors")
    assert "head.weight" not in HFFolderWeights(tmp_path).names()
    write_config(tmp_path, tie_word_embeddings=False)
    assert "head.weight" in HFFolderWeights(tmp_path).names()
    write_config(tmp_path)
    save_file(tensors | {"lm_head.weight": head + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match=r"differs from model\.embed_tokens.weight"):
        HFFolderWeights(tmp_path)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/etc/passwd.safetensors", "sub/x.safetensors", "..\\x.safetensors", "c:x.safetensors"],
)
def test_an_index_cannot_name_files_outside_its_folder(tmp_path: Path, shard: str) -> None:
    save_file(random_tensors(), tmp_path / "outside.safetensors")
    write_sharded(tmp_path / "m", {"model.norm.weight": shard})
    with pytest.raises(ModelFileError, match="which is not a plain file name inside that folder"):
        HFFolderWeights(tmp_path / "m")


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_links_are_followed_inside_the_folder_and_into_the_blobs_of_a_hub_cache_only(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--name"
    folder, blobs = repo / "snapshots" / ("a" * 40), repo / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    tensors = write_folder(folder)
    (folder / "model.safetensors").rename(blobs / "f00")
    (folder / "model.safetensors").symlink_to("../../blobs/f00")
    assert_same(HFFolderWeights(folder), tensors)
    (tmp_path / "alias").symlink_to(folder)
    assert_same(HFFolderWeights(tmp_path / "alias"), tensors)
    outside = tmp_path / "outside.safetensors"
    (blobs / "f00").rename(outside)
    (folder / "model.safetensors").unlink()
    for target in (outside, "../../../outside.safetensors", "model.safetensors"):
        (folder / "model.safetensors").symlink_to(target)
        with pytest.raises(ModelFileError, match=r"link out of its folder|cannot follow|cannot open|holds neither"):
            HFFolderWeights(folder)
        (folder / "model.safetensors").unlink()


def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    cases: dict[str, object] = {
        "weight_map must be an object": [],
        "weight_map must be an object of": {},
        "weight_map must be an object of tensor names": {"a": 1},
        "says that 'nothing' is in": {"nothing": first},
        "cannot open .*gone": {"a": "gone.safetensors"},
        "names 'pytorch_model.bin', which is not a safetensors file": {"a": "pytorch_model.bin"},
        "names 1025 files; at most 1024": {str(i): f"{i}.safetensors" for i in range(1025)},
    }
    for message, weight_map in cases.items():
        write_sharded(tmp_path, weight_map)  # type: ignore[arg-type]
        with pytest.raises(ModelFileError, match=message):
            HFFolderWeights(tmp_path)
    write_sharded(tmp_path)
    save_file(random_tensors(), tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFileError, match=r"is both in model-00001-of-00002\.safetensors and in model-00002"):
        HFFolderWeights(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelFileError, match=r"pickles .* are never read"):
        HFFolderWeights(tmp_path)


def pack(entries: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def entry(dtype: object = "F32", shape: object = (4,), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"\x01", "header of 1 bytes is announced but the file has 1"),
        (pack({}, length=2**64 - 1), "header of 18446744073709551615 bytes is announced"),
        (pack(b" " * 5_000_000), "at most 4194304 are read"),
        (pack(b"{"), "is not valid JSON"),
        (pack(b"\xff\xfe{}"), "is not valid JSON"),
        (pack(b"[]"), "must be a JSON object but is a list"),
        (pack(b'{"t":' * 90_000), "nested too deeply|is not valid JSON"),
        (pack(b'{"t":' + b"[" * 90_000), "nested too deeply"),
        (pack(b'{"t":' + b"9" * 5000 + b"}"), "is not valid JSON"),
        (pack(b'{"t":NaN}'), "NaN is not a JSON number"),
        (pack(b'{"t":1,"t":2}'), "key 't' appears 2 times"),
        (pack(b'{"t":{"dtype":"F32","dtype":"F16"}}'), "key 'dtype' appears 2 times"),
        (pack(b'{"t":[' + b"[]," * 1_390_000 + b"1]}"), "more than 250000 JSON items"),
        (pack(b'{"t":[' + b"[]," * 120_000 + b"1]}"), "described by a list"),
        (pack(b'{"t":[' + b"9999," * 200_000 + b"1]}"), "described by a list"),
        (pack(b"{" + b",".join(b'"%x":1' % i for i in range(100_000)) + b',"0":1}'), "key '0' appears 2 times"),
        (pack({"t": 1}), "described by a int"),
        (pack({"t": {}}), "stored as None; supported are F32, F16, BF16"),
        (pack({"t": entry("F8_E4M3")}, bytes(16)), "stored as F8_E4M3"),
        (pack({"t": entry("I64")}, bytes(16)), "stored as I64"),
        (pack({"t": entry(["F32"])}, bytes(16)), "stored as"),
        (pack({"t": entry(shape=[0])}, bytes(16)), "has the shape"),
        (pack({"t": entry(shape=[-4])}, bytes(16)), "has the shape"),
        (pack({"t": entry(shape=[True, 4])}, bytes(16)), "has the shape"),
        (pack({"t": entry(shape=[1.0])}, bytes(16)), "has the shape"),
        (pack({"t": entry(shape="4")}, bytes(16)), "has the shape"),
        (pack({"t": entry(shape=[1] * 5)}, bytes(16)), "up to 4 positive dimensions"),
        (pack({"t": entry(shape=[2**62, 4])}, bytes(16)), "more than 2..63 weights"),
        (pack({"t": entry(offsets=[0])}, bytes(16)), "instead of two whole numbers"),
        (pack({"t": entry(offsets=[-16, 0])}, bytes(16)), "instead of two whole numbers"),
        (pack({"t": entry(offsets=[0, 12])}, bytes(16)), "takes 16 bytes but has offsets 0 to 12"),
        (pack({"t": entry(offsets=[16, 0])}, bytes(16)), "takes 16 bytes but has offsets 16 to 0"),
        (pack({"t": entry()}, bytes(15)), "a partial download"),
        (pack({"t": entry(offsets=[2**63, 2**63 + 16])}, bytes(16)), "a partial download"),
        (pack({"a": entry(), "b": entry(offsets=[12, 28])}, bytes(32)), "'a' and 'b' overlap"),
    ],
)
def test_a_safetensors_file_that_lies_is_refused_quickly_in_little_memory(
    tmp_path: Path, data: bytes, message: str
) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert time.process_time() - started < 1.0
    tracemalloc.start()  # by itself: it makes everything four times slower
    try:
        with pytest.raises(ModelFileError):
            SafetensorsFile(path)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert re.search(message, str(caught.value))


def test_a_safetensors_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.ones((3, 5), np.float32), "b": np.ones(7, np.float16)}, path)
    for length in range(path.stat().st_size)[::-1]:
        os.truncate(path, length)
        with pytest.raises(ModelFileError):
            SafetensorsFile(path)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_transformers_saves_is_read_bit_for_bit(tmp_path: Path, sharded: bool, dtype: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        tie_word_embeddings=sharded,
        attention_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors").exists() is not sharded
    source = open_weights(tmp_path)
    state = {name: tensor for name, tensor in model.state_dict().items() if not (sharded and name == "lm_head.weight")}
    assert set(source.names()) == {Llama.names.from_hf(name) for name in state}
    for name, tensor in state.items():
        found = source.tensor(Llama.names.from_hf(name))
        assert found.encoding == {"float32": "F32", "bfloat16": "BF16"}[dtype]
        assert found.data.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    check_complete(source, {Llama.names.from_hf(name): tuple(tensor.shape) for name, tensor in state.items()})
    assert source.config.rope_theta == 500_000.0
    assert source.config.rope_scaling == RopeScaling(kind="llama3", factor=8.0, original_context=1024)
    assert (source.config.tied_embeddings, source.config.attention_bias) == (sharded, True)
