"""What octavo writes as GGUF, read by octavo, by the ``gguf`` package and by transformers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.core.config import DummyFormat
from octavo.core.errors import ModelFileError
from octavo.core.model_config import RopeScaling
from octavo.model.architectures.llama import Llama
from octavo.model.dummy import DummyWeights
from octavo.model.gguf_model import GGUFWeights, rotate_half_order, write_model
from octavo.text.dummy_vocabulary import dummy_vocabulary
from octavo.text.tokenizer import Tokenizer
from octavo.weights.gguf_file import GGUFFile
from weights.test_dummy import FORMATS, shape, shape_folder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def written(folder: Path, source: DummyWeights) -> Path:
    write_model(folder / "written.gguf", source, dummy_vocabulary(source.config.vocab_size))
    return folder / "written.gguf"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("encoding", FORMATS)
def test_octavo_reads_back_shape_and_bytes(tmp_path: Path, encoding: DummyFormat, tied: bool) -> None:
    source = DummyWeights(shape(tmp_path, tie_word_embeddings=tied, attention_bias=True), encoding)
    read = GGUFWeights(written(tmp_path, source))
    close = pytest.approx(source.config.rms_norm_eps)  # the file's numbers are float32
    assert dataclasses.replace(read.config, rms_norm_eps=close) == source.config
    assert set(read.names()) == set(source.names())
    for name in source.names():
        ours, theirs = source.tensor(name), read.tensor(name)
        assert (theirs.shape, theirs.encoding) == (ours.shape, ours.encoding)
        assert np.array_equal(theirs.data, ours.data), name


@pytest.mark.parametrize("encoding", FORMATS)
def test_the_gguf_package_decodes_what_was_meant(tmp_path: Path, encoding: DummyFormat) -> None:
    gguf = pytest.importorskip("gguf")
    source = DummyWeights(shape(tmp_path), encoding)
    reader = gguf.GGUFReader(written(tmp_path, source))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == len(list(source.names()))
    for name in source.names():
        meant, tensor = source.tensor(name), tensors[Llama.names.to_gguf(name)]
        assert tensor.tensor_type.name == meant.encoding
        assert tuple(reversed(tensor.shape.tolist())) == meant.shape
        decoded = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(meant.shape)
        rows = meant.to_float32()
        if name.split(".")[-2] in "qk":
            heads, order = rows.reshape(-1, source.config.head_dim, rows.shape[-1]), rotate_half_order(source.config)
            rows = heads[:, np.argsort(order)].reshape(rows.shape)
        np.testing.assert_array_equal(decoded, rows, err_msg=name)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    vocabulary = dummy_vocabulary(1000)
    assert fields["tokenizer.ggml.tokens"] == list(vocabulary["tokenizer.ggml.tokens"])  # type: ignore[call-overload]
    assert reader.fields["tokenizer.ggml.token_type"].types[-1] == gguf.GGUFValueType.INT32
    assert reader.fields["tokenizer.ggml.eos_token_id"].types == [gguf.GGUFValueType.UINT32]
    assert fields["llama.attention.head_count_kv"] == 2


@pytest.mark.slow
def test_transformers_computes_the_same_from_the_file_as_from_the_weights(tmp_path: Path) -> None:
    """Holds the order of Q and K's rows against somebody else's reading of it."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM

    source = DummyWeights(shape(tmp_path), "F32")
    file = written(tmp_path, source)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    state = read.state_dict()
    for part in ("q", "k"):
        ours = source.tensor(f"layers.1.{part}.weight").to_float32()
        theirs = state[f"model.layers.1.self_attn.{part}_proj.weight"].numpy()
        np.testing.assert_array_equal(theirs, ours)


@pytest.mark.parametrize(
    "scaling", [RopeScaling(kind="linear", factor=4.0), RopeScaling(kind="llama3", factor=8.0)], ids=lambda s: s.kind
)
def test_long_context_scaling_survives(tmp_path: Path, scaling: RopeScaling) -> None:
    config = dataclasses.replace(shape(tmp_path), rope_scaling=scaling, rope_theta=500_000.0)
    assert GGUFWeights(written(tmp_path, DummyWeights(config, "Q4_0"))).config.rope_scaling == scaling


def test_what_a_llama_file_cannot_say_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(shape(tmp_path), logits_soft_cap=30.0)
    with pytest.raises(ModelFileError, match="caps its scores"):
        written(tmp_path, DummyWeights(config, "F32"))
    with pytest.raises(ModelFileError, match="not a plain llama"):
        written(tmp_path, DummyWeights(dataclasses.replace(config, hidden_act="gelu"), "F32"))


def test_the_script_borrows_a_vocabulary_and_fills_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dummy_model

    lender = written(tmp_path, DummyWeights(shape(tmp_path), "Q4_0"))
    large = tmp_path / "large"
    large.mkdir()
    out = tmp_path / "out.gguf"
    arguments = ["dummy_model.py", "--format", "Q4_1", "--tokenizer", str(lender), "--out", str(out), "--shape"]
    monkeypatch.setattr(sys, "argv", [*arguments, str(shape_folder(large, vocab_size=1200) / "config.json")])
    dummy_model.main()
    assert f"{out.stat().st_size:,} bytes" in capsys.readouterr().out
    file = GGUFFile(out)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    assert tokenizer.vocab_size == 1200
    assert tokenizer.token_text(999) == Tokenizer.from_gguf(GGUFFile(lender).metadata).token_text(999)
    assert tokenizer.token_text(1199) == "[unused1199]"
    monkeypatch.setattr(sys, "argv", [*arguments, str(shape_folder(large, vocab_size=900))])
    with pytest.raises(SystemExit, match="1000 tokens but the shape has room for 900"):
        dummy_model.main()
    monkeypatch.setattr(sys, "argv", [*arguments, "llama-9b"])
    with pytest.raises(SystemExit, match=r"'llama-9b' is neither a file or folder here, nor one of tinyllama-1\.1b"):
        dummy_model.main()


def test_named_shapes_are_those_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dummy_model

    def size(name: str) -> int:
        source = DummyWeights(dummy_model.shape_config(name))
        return sum(int(np.prod(source.shape(tensor))) for tensor in source.names())

    assert size("tinyllama-1.1b") == 1_100_048_384  # of the models' own cards
    assert size("smollm2-135m") == 134_515_008
