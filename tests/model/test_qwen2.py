"""Qwen2 against transformers: its files, its biases, and the order of its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_llama import check_in_chunks

from octavo import LLM, SamplingParams
from octavo.core.errors import ModelFileError
from octavo.kernels.base import KVCacheLayout
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.torch.backend import TorchBackend
from octavo.model.architectures.qwen2 import Qwen2
from octavo.model.decoder import expected_tensors, load
from octavo.model.dummy import DummyWeights, open_dummy
from octavo.model.gguf_model import GGUFWeights, write_model
from octavo.model.hf_model import HFFolderWeights
from octavo.model.open_model import check_complete, open_weights
from octavo.text.dummy_vocabulary import dummy_vocabulary
from random_model import random_source, transformers_twin, variant

CONFIG_JSON: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "sliding_window": 32,  # means nothing without use_sliding_window
    "use_sliding_window": False,
    "tie_word_embeddings": True,
}


def dummy(folder: Path, **changes: Any) -> DummyWeights:
    (folder / "config.json").write_text(json.dumps(CONFIG_JSON | changes))
    return open_dummy(folder, "F32")


def gguf_file(folder: Path, **changes: Any) -> Path:
    source = dummy(folder, **changes)
    write_model(folder / "qwen2.gguf", source, dummy_vocabulary(source.config.vocab_size))
    return folder / "qwen2.gguf"


def test_queries_keys_and_values_have_biases_and_nothing_else(tmp_path: Path) -> None:
    source = dummy(tmp_path)
    assert source.config.architecture == "qwen2"
    assert source.config.sliding_window is None
    biased = {name.split(".")[-2] for name in expected_tensors(source.config) if name.endswith("bias")}
    assert biased == {"q", "k", "v"}


def test_a_gguf_file_has_the_rows_in_the_order_of_the_weights(tmp_path: Path) -> None:
    source, read = dummy(tmp_path), GGUFWeights(gguf_file(tmp_path))
    check_complete(read, expected_tensors(read.config))
    for name in source.names():
        assert np.array_equal(read.file.data(Qwen2.names.to_gguf(name)), source.tensor(name).data), name
        assert np.array_equal(read.tensor(name).data, source.tensor(name).data), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is on, which is not supported"),
        ({"use_sliding_window": "no"}, "use_sliding_window is 'no' but must be true or false"),
        ({"rope_scaling": {"type": "made up", "factor": 4.0}}, "rope_type is 'made up'"),
    ],
)
def test_what_is_not_plain_qwen2_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        dummy(tmp_path, **changes)


def test_a_file_without_its_biases_is_not_the_model(tmp_path: Path) -> None:
    read = GGUFWeights(gguf_file(tmp_path))
    for name in [name for name in read.names() if name.endswith("k.bias")]:
        del read._file_names[name]
    with pytest.raises(ModelFileError, match=r"the qwen2 architecture: layers\.0\.k\.bias \(32,\) is missing"):
        check_complete(read, expected_tensors(read.config))


def test_it_says_the_same_from_gguf_and_whatever_runs_beside_it(tmp_path: Path) -> None:
    file = gguf_file(tmp_path)
    prompts = [[5, 6, 7], [8] * 40, list(range(9, 60))]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(str(file), max_model_len=128, kv_cache_memory=16 << 20) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], params)[0] for prompt in prompts]
    for one, other in zip(alone, together, strict=True):
        assert one.completions[0].token_ids == other.completions[0].token_ids
        assert one.completions[0].logprobs == other.completions[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_transformers_in_chunks_of_any_size(tied: bool) -> None:
    check_in_chunks(random_source(variant(architecture="qwen2", attention_bias=True, tied_embeddings=tied)))


@pytest.mark.slow
def test_what_transformers_saves_is_the_model_that_was_saved(tmp_path: Path) -> None:
    source = random_source(variant(architecture="qwen2", attention_bias=True))
    twin = transformers_twin(source)
    twin.save_pretrained(tmp_path)
    read = open_weights(tmp_path)
    assert isinstance(read, HFFolderWeights)
    check_complete(read, expected_tensors(read.config))
    assert read.config.attention_bias
    for name in source.names():
        assert np.array_equal(read.tensor(name).to_float32(), source.arrays[name]), name


@pytest.mark.slow
def test_transformers_reads_the_gguf_file_as_it_was_meant(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    file = gguf_file(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
    ours = open_weights(file)
    for part in ("q", "k", "v"):
        for kind in ("weight", "bias"):
            found = theirs[f"model.layers.1.self_attn.{part}_proj.{kind}"].numpy()
            np.testing.assert_array_equal(found, ours.tensor(f"layers.1.{part}.{kind}").to_float32())


@pytest.mark.slow
def test_native_and_torch_agree(tmp_path: Path) -> None:
    """Both float32: the native kernels add the biases where torch does."""
    source = dummy(tmp_path)
    tokens = np.random.default_rng(2).integers(0, 320, 40).tolist()
    logprobs = []
    for backend in (NativeBackend(source.config, 1, "exact", "float32"), TorchBackend(source.config, device="cpu")):
        backend.bind(load(source, backend), max_tokens=64, max_seqs=4)
        backend.allocate_kv_cache(
            KVCacheLayout.full(num_layers=2, num_blocks=8, block_size=16, num_kv_heads=2, head_dim=16)
        )
        from octavo.core.plan import DrawRule
        from random_model import make_step

        step = make_step([(0, tokens)], [[1, 2, 3]], 16, target_rows=range(39))
        draw = DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)
        out = backend.run(step, [draw], [(token, 0) for token in tokens[1:]])
        logprobs.append([token.logprob for token in out.row_logprobs])
        backend.close()
    assert logprobs[0] == pytest.approx(logprobs[1], abs=2e-3)
