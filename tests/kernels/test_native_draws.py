"""What is remembered of draws: as much as helps the next step, and nothing of requests that are over."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from octavo import LLM
from octavo.core.limits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_TOKEN_ID_LIST
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.native import draws
from octavo.kernels.native.draws import DrawPacker
from weights.gguf_writer import random_llama


def costly(rng: random.Random, vocab: int, **more: object) -> SamplingParams:
    """As large as a request may be."""

    def ids(count: int) -> tuple[int, ...]:
        start = rng.randrange(5, vocab)
        return tuple([5 + (start + i) % (vocab - 5) for i in range(count)])

    return SamplingParams(
        allowed_token_ids=ids(MAX_TOKEN_ID_LIST),
        bad_words_token_ids=tuple(ids(MAX_BAD_WORD_TOKENS) for _ in range(MAX_BAD_WORDS)),
        logit_bias=tuple((token, 1.0) for token in ids(MAX_TOKEN_ID_LIST)),
        stop_token_ids=ids(MAX_TOKEN_ID_LIST),
        **more,  # type: ignore[arg-type]
    )


def held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_records_go_with_their_requests_and_no_memory_stays() -> None:
    rng, packer = random.Random(0), DrawPacker()
    tracemalloc.start()
    try:
        one = held_bytes()
        rules = [DrawRule(params=costly(rng, 40_000), random_stream=1)]
        packer.pack(rules)
        one, before = held_bytes() - one, held_bytes()
        assert one > 500_000, "the costliest set is not costly, or this test says nothing"
        for stream in range(3):
            plain = DrawRule(params=SamplingParams(stop_token_ids=tuple(range(stream, 4096))), random_stream=stream)
            packer.pack([*rules, DrawRule(params=costly(rng, 40_000), random_stream=stream), plain])
            packer.pack([plain])
        del plain
        assert held_bytes() - before < one / 5
        assert len(packer._prepared) == 1, "whoever is still there keeps its own"
        del rules
        assert (packer._prepared, packer._plain) == ({}, {})
    finally:
        tracemalloc.stop()


def test_what_does_not_change_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    real = draws._prepare
    monkeypatch.setattr(draws, "_prepare", lambda params: prepared.append(params) or real(params))
    packer, params = DrawPacker(), SamplingParams(top_k=7)
    rules = [DrawRule(params=params, random_stream=stream) for stream in range(3)]
    first = packer.pack(rules)
    assert packer.pack(rules) == first
    assert packer.pack(rules[1:] + rules[:1]) != first, "each draw has its own stream"
    assert len(prepared) == 1


def test_parameters_that_take_the_place_of_others_in_memory_are_not_taken_for_them() -> None:
    packer = DrawPacker()
    for top_k in range(2_000):  # each dies before the next is made, so that ids come again
        rule = DrawRule(params=SamplingParams(top_k=top_k), random_stream=top_k)
        record, _ = packer.pack([rule])
        assert packer.pack([rule])[0] == record
        assert draws.np.frombuffer(record, draws.DRAW_DTYPE)[0]["top_k"] == top_k
        del rule


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("model") / "random.gguf"
    random_llama(path, seed=3)
    return LLM(str(path), max_num_seqs=4, max_model_len=64, backend="native", threads=1)


def test_an_engine_that_has_served_costly_requests_is_as_small_as_before(llm: LLM) -> None:
    rng, vocab = random.Random(0), llm.engine.config.vocab_size

    def ask(count: int) -> None:
        for _ in range(count):
            llm.generate([[5, 6, 7]], costly(rng, vocab, max_tokens=3))

    ask(1)
    tracemalloc.start()
    try:
        before = held_bytes()
        ask(4)
        assert held_bytes() - before < 300_000  # a set takes 0.6 MB; traces of ended requests stay for a while
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("min_tokens", [1, 4, 8])
def test_min_tokens_holds_for_a_request_that_is_alone(llm: LLM, min_tokens: int) -> None:
    """Its draws are plain but for the stop tokens that they must not take."""
    prompt = [9, 8, 7]
    free = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))[0].completions[0]
    stop = free.token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=min_tokens, stop_token_ids=(stop,))
    ended = llm.generate([prompt], params)[0].completions[0]
    assert len(ended.token_ids) >= min_tokens
    assert stop not in ended.token_ids[:min_tokens]
    unbound = SamplingParams(temperature=0.0, max_tokens=8, stop_token_ids=(stop,))
    assert llm.generate([prompt], unbound)[0].completions[0].token_ids == [stop]
