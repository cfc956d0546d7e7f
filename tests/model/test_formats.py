"""Models in every encoding that files have: the same logprobs from the native backend and from torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.weights.dequantise import GROUP_LAYOUT, Encoding
from octavo.weights.repack import REPACKED
from weights.gguf_writer import random_llama, write_gguf
from weights.test_gguf_split import split, written_again

QUANTISED = [encoding for encoding, (weights, _) in GROUP_LAYOUT.items() if weights > 1]
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3, ignore_eos=True)
PROMPT = list(range(3, 43))
SMALL = {"kv_cache_memory": 1 << 22, "threads": 1}


def logprobs(path: Path, **options: object) -> tuple[np.ndarray, tuple[str, ...]]:
    """Of the prompt's tokens, and the notes of the start."""
    with LLM(model=str(path), **SMALL, **options) as llm:  # type: ignore[arg-type]
        [output] = llm.generate([PROMPT], PARAMS)
        assert output.prompt_logprobs is not None
        found = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
        return np.array(found), llm.engine.config.notes


@pytest.mark.parametrize("encoding", QUANTISED)
def test_a_file_of_every_encoding_gives_the_same_logprobs_on_both_backends(tmp_path: Path, encoding: Encoding) -> None:
    width = GROUP_LAYOUT[encoding][0]
    path = tmp_path / "m.gguf"
    random_llama(path, encoding=encoding, hidden_size=width, num_heads=2, num_kv_heads=1, intermediate_size=2 * width)
    native, notes = logprobs(path, kv_cache_dtype="float32")
    torch, torch_notes = logprobs(path, backend="torch")
    assert len(native) == len(PROMPT) - 1
    np.testing.assert_allclose(native, torch, atol=0.06)
    repacked = [note for note in notes if note.startswith(f"weights: 15 tensors of {encoding} are kept as int8 with")]
    assert len(repacked) == (encoding in REPACKED)
    assert any(f"tensors of {encoding} are kept as float32" in note for note in torch_notes)


def test_a_file_of_many_encodings_and_parts_loads_as_it_is(tmp_path: Path) -> None:
    """As "Q4_0" files are, whose head is Q6_K, and "UD" ones, whose every tensor may be something else."""
    first = split(tmp_path, encoding="Q4_0")
    assert np.array_equal(logprobs(first)[0], logprobs(tmp_path / "whole.gguf")[0])


def test_tensors_of_one_layer_may_differ(tmp_path: Path) -> None:
    from octavo.weights.gguf_file import GGUFFile

    mixed = {"attn_q": "Q5_0", "attn_k": "IQ2_XS", "attn_v": "Q8_0", "ffn_gate": "Q4_K", "ffn_up": "F16"}
    files = {}
    for encoding in ("Q6_K", *mixed.values()):
        random_llama(tmp_path / f"{encoding}.gguf", encoding=encoding, hidden_size=256, intermediate_size=256)
        files[encoding] = GGUFFile(tmp_path / f"{encoding}.gguf")
    tensors = {}
    for name in files["Q6_K"].tensors:
        file = files[mixed.get(name.split(".")[-2], "Q6_K")]
        tensors[name] = (file.tensors[name].encoding, file.tensors[name].shape, file.data(name).tobytes())
    write_gguf(tmp_path / "mixed.gguf", written_again(files["Q6_K"]), tensors)
    native, notes = logprobs(tmp_path / "mixed.gguf", kv_cache_dtype="float32")
    torch, _ = logprobs(tmp_path / "mixed.gguf", backend="torch")
    np.testing.assert_allclose(native, torch, atol=0.06)
    assert [note for note in notes if "kept as" in note] == [
        f"weights: 2 tensors of IQ2_XS are kept as int8 with a scale per 16, {notes_bytes()} bytes instead of 18,944"
    ]


def notes_bytes() -> str:
    """Two matrices [128, 256] of 17 bytes per 16 weights and an f16 per 256."""
    return f"{2 * 128 * (256 + 16 + 2):,}"
