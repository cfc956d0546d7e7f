"""``octavo doctor``: findings about machines that are not at hand; golden tokens of engines that are right or wrong."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.doctor import _examine, host_rows, machine_findings
from octavo.cli.golden import FLOAT32_MARGIN, NARROW_MARGIN, check_golden, golden_prompts
from octavo.cli.host import Host, package_version, probe_host
from octavo.core.config import EngineConfig
from octavo.engine.load import load_engine
from weights.test_dummy import shape_folder

GOOD_HOST = Host(
    cpu="a CPU",
    isa=("avx", "fma", "avx2"),
    cores=4,
    machine_cores=4,
    free_bytes=8 << 30,
    total_bytes=16 << 30,
    load_1min=0.1,
    system="Linux",
    python="CPython 3.11",
)


def said(**changes: Any) -> list[str]:
    has_backend = changes.pop("has_backend", True)
    host = dataclasses.replace(GOOD_HOST, **changes)
    return [f"{finding.level} {finding.text}" for finding in machine_findings(host, has_backend=has_backend)]


def test_a_good_machine_needs_no_remark() -> None:
    assert said() == []


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({"has_backend": False}, "FAIL", "pip install 'octavo[torch]'"),
        ({"free_bytes": 100 << 20}, "NOTE", "only 100.0 MiB of memory free"),
        ({"isa": ("avx",)}, "NOTE", "no AVX2"),
        ({"cores": 2}, "NOTE", "may use 2 of 4 cores"),
        ({"load_1min": 3.9}, "NOTE", "load 3.9"),
    ],
)
def test_a_bad_condition_is_explained(changes: dict[str, Any], level: str, words: str) -> None:
    (finding,) = said(**changes)
    assert finding.startswith(level)
    assert words in finding


def test_the_host_is_described_from_what_the_system_says() -> None:
    host = probe_host()
    assert host.cpu
    assert 1 <= host.cores <= host.machine_cores
    assert host.free_bytes > 0
    assert dict(host_rows(host))["CPU"] == host.cpu


def test_versions_are_known_without_importing() -> None:
    assert package_version("typer") is not None
    assert package_version("octavo_no_such_package") is None


def test_golden_tokens_are_the_sure_steps_of_the_reference(data_dir: Path) -> None:
    reference = {one["prompt"]: one for one in json.loads((data_dir / "smollm2_reference.json").read_text())}
    prompts = golden_prompts()
    assert len(prompts) >= 4
    for golden in prompts:
        full = reference[golden.prompt]
        assert list(golden.prompt_token_ids) == full["prompt_token_ids"]
        length = len(golden.greedy_token_ids)
        assert list(golden.greedy_token_ids) == full["greedy_token_ids"][:length]
        assert list(golden.greedy_margins) == full["greedy_margins"][:length]
        assert golden.sure_tokens(FLOAT32_MARGIN) == golden.greedy_token_ids
        assert all(margin > NARROW_MARGIN for margin in golden.greedy_margins[: len(golden.sure_tokens(NARROW_MARGIN))])
    assert sum(len(golden.sure_tokens(NARROW_MARGIN)) for golden in prompts) > 50


def right_answer(prompt: Sequence[int]) -> Sequence[int]:
    (golden,) = (g for g in golden_prompts() if [ord(c) for c in g.prompt] == list(prompt))
    return golden.greedy_token_ids


def with_character_tokens() -> list[Any]:
    """The stored prompts, as the fake engine tokenises them."""
    return [dataclasses.replace(g, prompt_token_ids=[ord(c) for c in g.prompt]) for g in golden_prompts()]


def test_an_engine_that_writes_the_golden_tokens_passes(fake_engine: Any) -> None:
    engine = fake_engine(right_answer, max_model_len=4096)
    result = check_golden(engine, with_character_tokens())
    assert result.differences == ()
    assert result.num_tokens == sum(len(g.greedy_token_ids) for g in golden_prompts())


@pytest.mark.parametrize("wrong_step", [0, 5])
def test_one_wrong_token_fails_and_is_named(fake_engine: Any, wrong_step: int) -> None:
    def answer(prompt: Sequence[int]) -> Sequence[int]:
        tokens = list(right_answer(prompt))
        if prompt[0] == ord("W"):  # "Water boils at ..."
            tokens[wrong_step] = 999
        return tokens

    (difference,) = check_golden(fake_engine(answer, max_model_len=4096), with_character_tokens()).differences
    assert f"'Water boils at a temperature of': token {wrong_step} of the answer is 999 but should be" in difference


def test_a_wrong_tokenizer_fails(fake_engine: Any) -> None:
    result = check_golden(fake_engine(lambda prompt: [1]), golden_prompts())
    assert len(result.differences) == result.num_prompts
    assert all("is tokenised differently" in difference for difference in result.differences)


def test_random_weights_in_the_default_models_shape_are_not_held_against_its_golden_tokens(tmp_path: Path) -> None:
    wish = EngineConfig(model=str(shape_folder(tmp_path)), load_format="dummy", kv_cache_memory=1 << 22, threads=1)
    loaded = load_engine(wish)
    try:
        findings = list(_examine(loaded, is_default=True))
    finally:
        loaded.close()
    assert [f.level for f in findings] == ["PASS", "NOTE"]
    assert "golden tokens: not compared" in findings[1].text
