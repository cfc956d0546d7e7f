"""Random weights without a file: the same ones each time, of a realistic size, one at a time."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from octavo.core.config import DummyFormat
from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.model.decoder import expected_tensors
from octavo.model.dummy import DummyWeights, open_dummy
from octavo.model.gguf_model import GGUFWeights
from octavo.model.open_model import check_complete
from weights.gguf_writer import llama_metadata, random_llama, write_gguf

FORMATS: tuple[DummyFormat, ...] = get_args(DummyFormat)
CONFIG_JSON = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 512,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-5,
}


def shape_folder(folder: Path, **changes: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | changes))
    return folder


def shape(folder: Path, **changes: object) -> ModelConfig:
    return open_dummy(shape_folder(folder, **changes), "F32").config


@pytest.mark.parametrize("encoding", FORMATS)
def test_a_folder_with_nothing_but_config_json_gives_every_tensor_of_the_model(
    tmp_path: Path, encoding: DummyFormat
) -> None:
    source = open_dummy(shape_folder(tmp_path), encoding)
    check_complete(source, expected_tensors(source.config))
    for name, wanted in expected_tensors(source.config).items():
        tensor = source.tensor(name)
        assert tensor.shape == wanted
        assert tensor.encoding == (encoding if len(wanted) == 2 else "F32")
        assert np.isfinite(tensor.to_float32()).all()


@pytest.mark.parametrize("encoding", FORMATS)
def test_matrices_keep_activations_near_one(tmp_path: Path, encoding: DummyFormat) -> None:
    source = DummyWeights(shape(tmp_path), encoding)
    for name in ("layers.0.q.weight", "layers.1.down.weight", "embedding.weight"):
        values = source.tensor(name).to_float32().astype(np.float64)
        wanted = values.shape[1] ** -0.5
        factor = 2**0.51 if encoding == "BF16" else 1.05
        assert wanted / factor < values.std() < wanted * factor
        # of random bits: Q4_0 has one integer more below zero than above, TQ2_0 one above that no file has
        uneven = {"Q4_0": 0.12, "Q5_0": 0.06, "IQ4_NL": 0.1, "TQ2_0": 0.5}.get(encoding, 0.04)
        assert abs(values.mean()) < uneven * wanted
        assert len(np.unique(values)) > 100
        assert np.unique(values, axis=0).shape == values.shape, "no two rows are the same"
    gains = source.tensor("layers.0.mlp_norm.weight").to_float32()
    assert gains.min() >= 0.9
    assert gains.max() <= 1.1


def test_tensors_do_not_depend_on_the_order_in_which_they_are_read_but_on_the_seed(tmp_path: Path) -> None:
    config = shape(tmp_path)
    first, again, other = (
        DummyWeights(config, "Q4_1"),
        DummyWeights(config, "Q4_1"),
        DummyWeights(config, "Q4_1", seed=1),
    )
    names = list(first.names())
    backwards = {name: again.tensor(name).data for name in reversed(names)}
    for name in names:
        assert np.array_equal(first.tensor(name).data, backwards[name])
        assert not np.array_equal(first.tensor(name).data, other.tensor(name).data)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.fingerprint != DummyWeights(config, "Q4_0").fingerprint


def test_no_more_than_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    source = DummyWeights(shape(tmp_path, vocab_size=8000, num_hidden_layers=12), "F32")
    largest = max(int(np.prod(source.shape(name))) * 4 for name in source.names())
    tracemalloc.start()
    for name in source.names():
        source.tensor(name)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < 1.6 * largest


def test_a_gguf_gives_the_shape_whether_it_has_weights_or_not(tmp_path: Path) -> None:
    full, bare = tmp_path / "full.gguf", tmp_path / "bare.gguf"
    random_llama(full, hidden_size=64, vocab_size=288, tied=True)
    source = open_dummy(full, "Q8_0")
    assert source.config == GGUFWeights(full).config
    assert "head.weight" not in source.names()
    assert source.metadata["tokenizer.ggml.model"] == "gpt2"
    keys = llama_metadata(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96)
    write_gguf(bare, keys | {"llama.vocab_size": 500}, {})
    assert open_dummy(bare, "Q8_0").shape("head.weight") == (500, 64)


def test_what_describes_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no config\.json to take a shape from"):
        open_dummy(tmp_path, "F32")
    bare = tmp_path / "bare.gguf"
    write_gguf(
        bare, llama_metadata(num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, intermediate_size=96), {}
    )
    with pytest.raises(ModelFileError, match="vocab_size is missing"):
        open_dummy(bare, "F32")
    source = DummyWeights(shape(tmp_path, hidden_size=80), "Q4_0")
    with pytest.raises(ModelFileError, match=r"a matrix \(80, 80\) cannot be Q4_0: .* groups of 32"):
        source.tensor("layers.0.q.weight")
    with pytest.raises(ModelFileError, match=r"has no tensor 'layers\.0\.x'"):
        source.tensor("layers.0.x")
