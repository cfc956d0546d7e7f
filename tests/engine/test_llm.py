from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, EngineUnavailable, InvalidRequest, SamplingParams
from octavo.core.config import EngineConfig
from weights.gguf_writer import random_llama


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=1)
    return LLM(str(path), max_num_seqs=4, max_model_len=64)


def test_results_come_in_the_order_of_the_prompts_whatever_their_number(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    prompts = [[3 + i % 20] * (1 + i % 7) for i in range(23)]
    results = llm.generate(prompts, params, progress=True)
    assert [list(result.prompt_token_ids) for result in results] == prompts
    alone = [llm.generate(prompt, params)[0].completions[0].token_ids for prompt in prompts]
    assert [result.completions[0].token_ids for result in results] == alone


def test_a_progress_bar_is_drawn_on_a_terminals_standard_error_and_nowhere_else(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(["a", "b"], params, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["a", "b"], params, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "generating" in err


def test_each_prompt_may_have_its_own_parameters_and_several_choices(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n, logprobs=1) for n in (1, 2, 3)]
    results = llm.generate(["a", "b", "c"], params, n=2)
    assert [[len(c.token_ids) for c in r.completions] for r in results] == [[1, 1], [2, 2], [3, 3]]
    assert all(c.logprobs and len(c.logprobs) == len(c.token_ids) for r in results for c in r.completions)


def test_prompt_logprobs_cover_every_position_but_the_first(llm: LLM) -> None:
    (result,) = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert result.prompt_logprobs is not None
    assert [token.token_id for token in result.prompt_logprobs] == [6, 7, 8]
    assert result.completions[0].token_ids == []


def test_one_bad_prompt_stops_the_call_before_anything_runs(llm: LLM) -> None:
    steps = llm.engine.tracer.metrics.steps
    with pytest.raises(InvalidRequest, match="no tokens"):
        llm.generate([[1], []], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="2 sampling parameters were given for 1"):
        llm.generate([[1]], [SamplingParams(), SamplingParams()])
    assert llm.engine.tracer.metrics.steps == steps
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("inside", ["between steps", "a step"])
def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch, inside: str) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    engine = llm.engine
    where, name = (engine, "step") if inside == "between steps" else (engine.runner, "execute")
    monkeypatch.setattr(where, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SamplingParams(max_tokens=3))
    assert not engine.has_unfinished
    engine.scheduler.manager.check_integrity()
    assert not llm.engine.processor._sequences
    monkeypatch.undo()
    assert len(llm.generate([1], SamplingParams(max_tokens=3, ignore_eos=True))[0].completions[0].token_ids) == 3


def test_one_prompt_of_token_ids_may_be_any_sequence_of_whole_numbers(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    (expected,) = llm.generate([3, 4, 5], params)
    for prompt in ((3, 4, 5), np.array([3, 4, 5]), [np.array([3, 4, 5])]):
        (result,) = llm.generate(prompt, params)  # type: ignore[arg-type]
        assert (result.prompt_token_ids, result.text) == ((3, 4, 5), expected.text)


def test_a_closed_model_says_so(tmp_path: Path) -> None:
    random_llama(tmp_path / "random.gguf", seed=1)
    with LLM(str(tmp_path / "random.gguf"), max_model_len=64) as closed:
        pass
    closed.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        closed.generate("a")


def test_a_step_may_be_smaller_than_a_block(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(llm.engine.config.model_path, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=1) as small:
        assert small.generate([[3, 4, 5]], params)[0].text == llm.generate([[3, 4, 5]], params)[0].text


def test_chat_answers_one_conversation_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    params = SamplingParams(temperature=0.0, max_tokens=3)
    single = llm.chat(one, params)
    several = llm.chat([one, one], params)
    assert [r.text for r in several] == [single.text] * 2


def test_config_and_fields_cannot_both_be_given() -> None:
    with pytest.raises(InvalidRequest, match="either config="):
        LLM("x", config=EngineConfig())
