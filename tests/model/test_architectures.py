"""Every architecture against transformers, from safetensors and GGUF, in chunks; on native the same bits always."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_cases import CASES, SHAPE, VOCAB, Case, twin_of, write_twin
from numpy.typing import NDArray

from machine import Answers, Machine, choices_of
from octavo import LLM, EngineConfig
from octavo.core.cache_group import CacheGroup
from octavo.core.plan import SampledToken
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Backend, KVCacheLayout, ModelInput
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.torch.backend import TorchBackend
from octavo.model.decoder import expected_tensors, load
from octavo.model.open_model import check_complete, open_weights
from octavo.model.registry import ARCHITECTURES
from octavo.model.weight_source import WeightSource
from random_model import make_step

pytestmark = pytest.mark.slow
BLOCK = 16
LENGTH = 90


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(case, tokens, transformers' logprobs [tokens, vocab], its folder, its GGUF file or None)."""
    import torch

    case = CASES[request.param]
    folder = tmp_path_factory.mktemp("model")
    twin = twin_of(case)
    twin.save_pretrained(folder)
    file = None
    if case.arch is not None:
        file = folder / "file" / "model.gguf"
        file.parent.mkdir()
        write_twin(case, twin, file)
    length = min(LENGTH, case.context or LENGTH)
    tokens = np.random.default_rng(3).integers(0, VOCAB, length)
    force_table(twin, case)
    with torch.no_grad():
        logprobs = twin(torch.from_numpy(tokens[None])).logits[0].log_softmax(-1).numpy()
    return case, tokens.tolist(), logprobs, folder, file


def force_table(twin: Any, case: Case) -> None:
    """Where transformers chooses the rotations by the length of a sequence: those of the longest one."""
    if case.context is None:
        return
    import torch

    with torch.no_grad():
        twin(torch.zeros(1, case.context, dtype=torch.long))
    for module in twin.modules():
        if hasattr(module, "rope_type") and "rope_type" in vars(module):
            module.rope_type = "default"  # whatever comes next leaves the frequencies as they are


def backend_of(source: WeightSource, make: Any, case: Case) -> Backend:
    c = source.config
    check_complete(source, expected_tensors(c))
    backend: Backend = make(c)
    backend.bind(load(source, backend, case.context), max_tokens=256, max_seqs=8)
    backend.allocate_kv_cache(
        KVCacheLayout.full(
            num_layers=c.num_layers, num_blocks=40, block_size=BLOCK, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim
        )
    )
    return backend


def native(c: Any) -> NativeBackend:
    return NativeBackend(c, 2, "exact", "float32", activations="int8")


def in_chunks(backend: Backend, tokens: list[int], cuts: list[int], table: list[int]) -> list[SampledToken]:
    """Logprob of each next token, and the most probable one."""
    found: list[SampledToken] = []
    for start, end in pairwise(cuts):
        step = rows_of(make_step([(start, tokens[start:end])], [table], BLOCK), range(end - start))
        targets = [(token, 1) for token in [*tokens, 0][start + 1 : end + 1]]
        for row in backend.run(step, [], targets).row_logprobs:
            assert isinstance(row, SampledToken)
            found.append(row)
    return found


def rows_of(step: ModelInput, rows: Iterable[int]) -> ModelInput:
    """The step with other rows, without that of a draw."""
    return ModelInput.of(
        token_ids=step.token_ids,
        positions=step.positions,
        slot_mapping=step.slot_mapping.reshape(-1),
        logit_rows=rows,
        query_starts=step.query_starts,
        context_lens=step.context_lens,
        block_tables=list(step.block_tables[0]),
        copies=step.copies.tolist(),
    )


def close_to(found: list[SampledToken], logprobs: NDArray[np.float32], tokens: list[int]) -> None:
    wanted = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose([row.logprob for row in found[:-1]], wanted, atol=2e-4)
    best = np.sort(logprobs, axis=-1)
    clear = best[:, -1] - best[:, -2] > 1e-3  # a soft cap makes near equals of large logits
    assert clear.mean() > 0.9
    assert np.all((np.array([row.top[0][0] for row in found]) == logprobs.argmax(-1))[clear])


@pytest.mark.parametrize("make", [native, lambda c: TorchBackend(c, device="cpu", threads=1)], ids=["native", "torch"])
@pytest.mark.parametrize("file_format", ["safetensors", "gguf"])
def test_logprobs_are_those_of_transformers(made: Any, make: Any, file_format: str) -> None:
    case, tokens, logprobs, folder, file = made
    if file_format == "gguf" and file is None:
        return  # llama.cpp does not convert such a model
    source = open_weights(folder if file_format == "safetensors" else file)
    backend = backend_of(source, make, case)
    n = len(tokens)
    close_to(in_chunks(backend, tokens, [0, n], [3, 1, 5, 2, 7, 9]), logprobs, tokens)
    close_to(in_chunks(backend, tokens, [0, 1, 2, 9, 10, 33, n], [10, 31, 15, 22, 17, 19]), logprobs, tokens)
    backend.close()
    source.close()


def test_the_same_bits_in_chunks_in_company_and_after_a_prefix_hit(made: Any) -> None:
    case, tokens, _, folder, _ = made
    source = open_weights(folder)
    backend = backend_of(source, native, case)
    n, table = len(tokens), [3, 1, 5, 2, 7, 9]
    alone = in_chunks(backend, tokens, [0, n], table)
    assert in_chunks(backend, tokens, [0, 1, 13, 14, 40, n], [10, 31, 15, 22, 17, 19]) == alone
    # two blocks of the first run, and the head of a third copied
    hit = [3, 1, 30, 32, 33, 34]
    step = rows_of(make_step([(40, tokens[40:])], [hit], BLOCK, copies=[(0, 5, 30, 8)]), range(n - 40))
    targets = [(token, 1) for token in [*tokens[41:], 0]]
    assert backend.run(step, [], targets).row_logprobs == alone[40:]
    # beside others
    rng = np.random.default_rng(1)
    other = rng.integers(0, VOCAB, 30).tolist()
    step = rows_of(make_step([(n - 1, tokens[-1:]), (0, other)], [table, [20, 21]], BLOCK), [0])
    assert backend.run(step, [], [(0, 1)]).row_logprobs == alone[-1:]
    backend.close()
    source.close()


def answers(source: WeightSource, case: Case, num_blocks: int, *, grouped: bool) -> tuple[Answers, list[Machine]]:
    """Of prompts that share heads, with several answers. grouped: all at once, in few blocks for each kind of layer;
    else one by one, with everything kept.
    """
    c = source.config
    backend = native(c)
    backend.bind(load(source, backend, case.context), max_tokens=256, max_seqs=8)
    groups = c.cache_groups if grouped else (CacheGroup(kind="full", layers=tuple(range(c.num_layers))),)
    spare = {"full": 0, "window": 24, "state": 0}  # so that what keeps everything is what runs out
    counts = tuple(group.blocks_for(num_blocks * BLOCK, BLOCK) + spare[group.kind] for group in groups)
    backend.allocate_kv_cache(
        KVCacheLayout(
            groups=groups, num_blocks=counts, block_size=BLOCK, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim
        )
    )
    stem = np.random.default_rng(5).integers(0, VOCAB, 60).tolist()
    machines, together = [], Machine(backend, groups, counts, 23)
    for number, (shared, choices) in enumerate([(50, 2), (50, 1), (33, 3), (60, 1)]):
        prompt = (*stem[:shared], number + 1, 7)
        for request in choices_of(number, prompt, choices, max_tokens=24, logprobs=2):
            machine = together if grouped else Machine(backend, groups, counts, 256)
            machine.scheduler.add(request if grouped else replace(request, fork_of=None))
            machines.append(machine)
            if not grouped:
                machine.run()
    if grouped:
        together.run()
        machines = [together]
    backend.close()
    found: Answers = {}
    for machine in machines:
        found |= machine.answers
    return found, machines


def test_the_same_bits_when_forked_and_preempted_in_small_pools(made: Any) -> None:
    case, _, _, folder, _ = made
    source = open_weights(folder)
    expected, _ = answers(source, case, 20, grouped=False)
    found, (machine,) = answers(source, case, 8, grouped=True)
    assert found == expected
    admissions = [admission for plan in machine.plans for admission in plan.admitted]
    assert any(admission.miss_reason == "forked" for admission in admissions)
    assert any(admission.cached_tokens > 16 for admission in admissions)
    keeps_everything = source.config.cache_groups[0].kind == "full"
    assert any(plan.preempted for plan in machine.plans) == keeps_everything
    source.close()


def test_every_architecture_has_a_case() -> None:
    covered = {case.model_type for case in CASES.values()} | {case.arch for case in CASES.values()}
    assert ARCHITECTURES.keys() - covered <= {"gemma3"}


WIDE = {**SHAPE, "initializer_range": 0.3}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**WIDE, "sliding_window": 12, "tie_word_embeddings": True}},
    "mistral3": {"text_config": {**WIDE, "model_type": "ministral3", "tie_word_embeddings": False},
                 "tie_word_embeddings": False},
}  # fmt: skip


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_of_a_model_that_reads_images_the_text_part_is_served(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = AutoConfig.for_model(model_type, vision_config=vision, **WRAPPERS[model_type])
    twin = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    twin.save_pretrained(tmp_path)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 50)
    with torch.no_grad():
        logprobs = twin(input_ids=torch.from_numpy(tokens[None])).logits[0].log_softmax(-1).numpy()
    assert logprobs.std() > 0.5
    source = open_weights(tmp_path)
    assert "tensors that read images are left out" in caplog.text
    backend = backend_of(source, native, Case(model_type))
    found = in_chunks(backend, tokens.tolist(), [0, 20, 50], [3, 1, 5, 2])
    wanted = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
    np.testing.assert_allclose([row.logprob for row in found[:-1]], wanted, atol=2e-4)
    backend.close()
    source.close()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.arch])
def test_served_from_gguf_the_schedule_changes_no_token(name: str, tmp_path: Path) -> None:
    """One by one; then all at once in small chunks, with forks, hits and a pool that runs dry."""
    case = CASES[name]
    write_twin(case, twin_of(case), tmp_path / "model.gguf")
    rng = np.random.default_rng(4)
    head = rng.integers(0, VOCAB, 21).tolist()
    longest = case.context or 96
    prompts = [(head + rng.integers(0, VOCAB, n).tolist())[: longest - 40] for n in (1, 3, 17, 30, 50, 9)]
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=38, ignore_eos=True, logprobs=2)

    def answers(llm: LLM, asked: list[list[list[int]]]) -> list[Any]:
        found = [request for prompts in asked for request in llm.generate(prompts, params, n=2)]
        return [[(c.token_ids, c.logprobs) for c in request.completions] for request in found]

    with LLM(str(tmp_path / "model.gguf"), max_model_len=longest, kv_cache_memory=16 << 20) as llm:
        alone = answers(llm, [[prompt] for prompt in prompts])
    tight = EngineConfig(
        model=str(tmp_path / "model.gguf"), max_model_len=longest, chunking="fixed", chunk_size=16, max_num_seqs=6,
        kv_cache_memory=llm_bytes(tmp_path / "model.gguf", 9),
    )  # fmt: skip
    with LLM(config=tight) as llm:
        assert answers(llm, [prompts]) == alone
        assert answers(llm, [prompts]) == alone
        keeps_everything = llm.engine.config.cache_groups[0][0] == "full"  # windows are never short of room
        assert llm.engine.tracer.metrics.preemptions > 0 or not keeps_everything
        hits = [llm.generate([prompt], params)[0].completions[0].usage for prompt in prompts]
        # in nine blocks, the head of a prompt that its window has left is soon lost
        assert max(usage.cached_tokens for usage in hits if usage is not None) > 0 or not keeps_everything


def llm_bytes(file: Path, num_blocks: int) -> int:
    """Of a pool of so many blocks."""
    source = open_weights(file)
    made = NativeBackend(source.config, 1)
    size = num_blocks * 16 * made.kv_bytes_per_token(source.config, source.config.num_layers)
    made.close()
    source.close()
    return size
