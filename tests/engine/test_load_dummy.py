"""``load_format="dummy"``: an engine without a file of weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.core.config import DummyFormat, EngineConfig
from octavo.core.errors import ModelFileError
from octavo.engine.load import load_engine
from octavo.model.dummy import open_dummy
from octavo.model.gguf_model import write_model
from octavo.text.dummy_vocabulary import dummy_vocabulary
from weights.gguf_writer import random_llama
from weights.test_dummy import FORMATS, shape_folder

PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
SMALL = {"kv_cache_memory": 1 << 22, "threads": 1}


@pytest.mark.parametrize("encoding", FORMATS)
def test_random_weights_are_the_same_from_a_config_and_from_the_file_that_they_were_written_to(
    tmp_path: Path, encoding: DummyFormat
) -> None:
    folder = shape_folder(tmp_path)
    source = open_dummy(folder, encoding)
    file = tmp_path / "written.gguf"
    write_model(file, source, dummy_vocabulary(source.config.vocab_size))
    answers = []
    for options in ({"model": str(folder), "load_format": "dummy", "dummy_format": encoding}, {"model": str(file)}):
        with LLM(**options, **SMALL) as llm:
            [answer] = llm.generate(["Once upon"], PARAMS)[0].completions
        assert len(answer.token_ids) == 8
        assert answer.text
        answers.append((answer.token_ids, answer.logprobs))
    assert answers[0] == answers[1]


def test_a_vocabulary_that_is_there_is_used_and_the_weights_beside_it_are_not(tmp_path: Path) -> None:
    file = tmp_path / "real.gguf"
    random_llama(file, vocab_size=288)
    real = load_engine(EngineConfig(model=str(file), kv_cache_memory=1 << 22, threads=1))
    dummy = load_engine(
        EngineConfig(model=str(file), load_format="dummy", dummy_format="F32", kv_cache_memory=1 << 22, threads=1)
    )
    try:
        text = "the other"
        assert dummy.tokenizer.encode(text) == real.tokenizer.encode(text)
        assert dummy.chat_template is not None
        assert dummy.config.notes[0] == "weights: random F32"
        assert dummy.config.system_fingerprint != real.config.system_fingerprint
    finally:
        real.close()
        dummy.close()


def test_a_chat_ends_where_the_template_that_was_given_ends_an_answer(tmp_path: Path) -> None:
    file, template = tmp_path / "real.gguf", tmp_path / "template.jinja"
    random_llama(file, vocab_size=288)
    template.write_text("{% for m in messages %}{{ m.content }}<|im_start|>{% endfor %}", encoding="utf-8")
    for chat_template, has in ((None, False), (str(template), True)):
        engine = load_engine(
            EngineConfig(model=str(file), chat_template=chat_template, kv_cache_memory=1 << 22, threads=1)
        )
        try:
            [start] = engine.tokenizer.encode("<|im_start|>", parse_special=True, add_bos=False)
            assert (start in engine.config.eos_token_ids) == has
            assert engine.tokenizer.eos_token_ids <= engine.config.eos_token_ids
        finally:
            engine.close()


def test_without_the_wish_for_random_weights_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"holds neither model\.safetensors nor"):
        load_engine(EngineConfig(model=str(shape_folder(tmp_path))))
