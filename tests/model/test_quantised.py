"""Packing a wide model: at load (``--quantize``) and into a file (``octavo convert``)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.cli.convert import convert as command
from octavo.core.errors import ConfigError, ModelFileError
from octavo.model.convert import convert
from octavo.model.gguf_model import GGUFWeights
from octavo.model.open_model import open_weights
from octavo.model.quantised import QuantisedWeights, format_for
from octavo.weights.gguf_file import GGUFFile
from weights.gguf_writer import random_llama
from weights.test_gguf_split import split

PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
SMALL = {"kv_cache_memory": 1 << 22, "threads": 1}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 2, "num_kv_heads": 1}


def logprobs(path: Path, **options: object) -> tuple[list[float], tuple[str, ...]]:
    with LLM(model=str(path), **SMALL, **options) as llm:  # type: ignore[arg-type]
        [output] = llm.generate([list(range(3, 43))], PARAMS)
        assert output.prompt_logprobs is not None
        return [entry.logprob for entry in output.prompt_logprobs if entry is not None], llm.engine.config.notes


def test_formats_follow_llama_quantize_where_rows_do_not_fit() -> None:
    def chosen(wanted: object, columns: int, stored: object = "BF16", is_head: bool = False) -> str:
        return format_for(wanted, stored, (8, columns), is_head=is_head)  # type: ignore[arg-type]

    assert [chosen(w, 512) for w in ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K")] == [
        "Q4_0",
        "Q4_1",
        "Q8_0",
        "Q4_K",
        "Q5_K",
    ]
    assert [chosen(w, 896) for w in ("Q4_K", "Q5_K", "Q6_K", "Q4_1")] == ["Q5_0", "Q5_1", "Q8_0", "Q4_1"]
    assert [chosen(w, 40) for w in ("Q4_K", "Q4_1", "Q8_0")] == ["F16"] * 3
    assert [chosen(w, 512, is_head=True) for w in ("Q4_0", "Q4_K", "Q8_0")] == ["Q6_K", "Q6_K", "Q8_0"]
    assert chosen("Q4_K", 896, is_head=True) == "Q8_0"
    assert chosen("Q4_K", 512, stored="Q4_1") == "Q4_1"
    assert format_for("Q4_K", "F32", (256,), is_head=False) == "F32"


@pytest.mark.parametrize("wide", ["F32", "F16", "BF16"])
def test_a_wide_model_is_packed_at_load_and_says_so(tmp_path: Path, wide: str) -> None:
    path = tmp_path / "m.gguf"
    random_llama(path, encoding=wide, **WIDE)  # type: ignore[arg-type]
    truth, notes = logprobs(path)
    assert not any("packed" in note for note in notes)
    packed, notes = logprobs(path, quantize="q8_0")
    np.testing.assert_allclose(packed, truth, atol=0.1)
    assert "weights: packed to q8_0: 15 of Q8_0" in notes
    _, notes = logprobs(path, quantize="q4_k")
    assert "weights: packed to q4_k: 14 of Q4_K, 1 of Q6_K" in notes


@pytest.mark.parametrize("wanted", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"])
def test_a_converted_file_is_what_would_have_been_packed_at_load(tmp_path: Path, wanted: str) -> None:
    path, out = tmp_path / "m.gguf", tmp_path / "out.gguf"
    random_llama(path, encoding="BF16", tied=False, biases=True, **WIDE)  # type: ignore[arg-type]
    size = convert(path, out, wanted)  # type: ignore[arg-type]
    assert size == out.stat().st_size < path.stat().st_size
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out.gguf"]
    packed, read = QuantisedWeights(GGUFWeights(path), wanted), GGUFWeights(out)  # type: ignore[arg-type]
    assert set(read.names()) == set(packed.names())
    for name in packed.names():
        assert read.encoding(name) == packed.encoding(name)
        assert np.array_equal(read.tensor(name).data, packed.tensor(name).data), name
    assert logprobs(out)[0] == logprobs(path, quantize=wanted)[0]
    before, after = GGUFFile(path).metadata, GGUFFile(out).metadata
    assert {k: v for k, v in after.items() if k not in ("general.file_type", "general.quantization_version")} == before


def test_parts_become_one_file_and_packed_weights_stay(tmp_path: Path) -> None:
    first, out = split(tmp_path, encoding="Q4_1"), tmp_path / "out.gguf"
    for source in (first, first.parent):
        convert(source, out, "q4_k")
        whole, joined = GGUFFile(tmp_path / "whole.gguf"), GGUFFile(out)
        assert {name: t.encoding for name, t in joined.tensors.items()} == {
            n: t.encoding for n, t in whole.tensors.items()
        }
        assert all(np.array_equal(joined.data(name), whole.data(name)) for name in whole.tensors)
        assert not any(key.startswith("split.") for key in joined.metadata)


def test_a_folder_of_safetensors_borrows_a_vocabulary(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(num_hidden_layers=1, vocab_size=288, **shape)
    folder = tmp_path / "hf"
    LlamaForCausalLM(config).save_pretrained(folder)
    lender = tmp_path / "lender.gguf"
    random_llama(lender, vocab_size=288)
    out = tmp_path / "out.gguf"
    with pytest.raises(ModelFileError, match="has no GGUF vocabulary; name a GGUF file"):
        convert(folder, out, None)
    convert(folder, out, "q4_k", lender)
    wide, read = open_weights(folder), GGUFWeights(out)
    assert read.encoding("layers.0.gate.weight") == "Q4_K"
    ours, theirs = (source.tensor("layers.0.q.weight").to_float32() for source in (wide, read))
    assert np.linalg.norm(ours - theirs) < 0.08 * np.linalg.norm(ours)
    assert read.file.metadata["tokenizer.ggml.model"] == "gpt2"
    random_llama(lender, vocab_size=300)
    with pytest.raises(ModelFileError, match="has 300 tokens but the model 288"):
        convert(folder, out, None, lender)
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 288


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    random_llama(path)
    with pytest.raises(ConfigError, match="--quantize is 'q3_k' but must be one of q4_0, q4_1"):
        command(str(path), tmp_path / "out.gguf", quantize="q3_k")
    with pytest.raises(ModelFileError, match="cannot write"):
        command(str(path), tmp_path / "none" / "out.gguf")
    command(str(path), path, quantize="q8_0")  # in place
    assert GGUFFile(path).tensors["blk.0.ffn_up.weight"].encoding == "Q8_0"
    assert "KiB" in capsys.readouterr().err


def test_a_weight_that_no_format_holds_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    random_llama(path)
    data = bytearray(path.read_bytes())
    tensor = GGUFFile(path).tensors["blk.1.ffn_up.weight"]
    data[tensor.start : tensor.start + 4] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=r"blk\.1\.ffn_up\.weight: Q8_0 cannot hold a weight that is not finite"):
        convert(path, tmp_path / "out.gguf", "q8_0")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
