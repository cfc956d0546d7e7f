"""Golden tokens: does this machine, with these kernels, write what the default model is known to write?"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from octavo.core.config import ResolvedConfig
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.requests import make_requests

#: A step counts while the reference's margin (natural log) exceeds this; the first smaller one ends the comparison,
#: since another rounding may pick the other token there, and then everything after it differs.
FLOAT32_MARGIN = 0.05
#: The same where activations or the KV cache are narrower than float32 (bfloat16, int8).
NARROW_MARGIN = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenPrompt:
    """A prompt, its tokens, and the reference's greedy continuation with the margin of each step."""

    prompt: str
    prompt_token_ids: Sequence[int]
    greedy_token_ids: Sequence[int]
    greedy_margins: Sequence[float]

    def sure_tokens(self, min_margin: float) -> list[int]:
        """The continuation up to the first step whose margin is ``min_margin`` or less."""
        unsure = (i for i, margin in enumerate(self.greedy_margins) if margin <= min_margin)
        return list(self.greedy_token_ids[: next(unsure, len(self.greedy_token_ids))])


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenResult:
    """What the comparison found. It passed if ``differences`` is empty."""

    num_prompts: int
    num_tokens: int  # compared
    differences: tuple[str, ...]


def golden_prompts() -> list[GoldenPrompt]:
    """The prompts stored in the package. They belong to the default model."""
    stored = json.loads(files("octavo.cli").joinpath("golden.json").read_text(encoding="utf-8"))
    return [GoldenPrompt(**prompt) for prompt in stored["prompts"]]


def min_margin(config: ResolvedConfig) -> float:
    """How sure the reference must have been for this engine to have to agree."""
    # The torch backend computes in its dtype throughout; "float32" of another may still multiply in int8.
    exact = config.backend == "torch" and config.dtype == config.kv_dtype == "float32"
    return FLOAT32_MARGIN if exact else NARROW_MARGIN


def sha256_of(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_golden(engine: Engine, prompts: Sequence[GoldenPrompt]) -> GoldenResult:
    """Tokenise and continue all prompts at once, greedily, and compare with what is stored."""
    expected: dict[str, list[int]] = {}
    written: dict[str, list[int]] = {}
    differences = []
    for index, golden in enumerate(prompts):
        ids = engine.tokenizer.encode(golden.prompt, parse_special=True)
        if list(ids) != list(golden.prompt_token_ids):
            differences.append(f"prompt {index}, {_short(golden.prompt)}, is tokenised differently")
            continue
        request_id, sure = f"golden-{index}", golden.sure_tokens(min_margin(engine.config))
        sampling = SamplingParams(temperature=0.0, max_tokens=len(sure), ignore_eos=True)
        if sure:
            expected[request_id], written[request_id] = sure, []
            engine.submit(
                make_requests(
                    engine.config,
                    Submission(request_id=request_id, prompt_token_ids=ids, sampling=sampling),
                    arrival_s=time.monotonic(),
                )
            )
    while engine.has_unfinished:
        for output in engine.step():
            written[output.request_id].extend(output.token_ids)
    for index, golden in enumerate(prompts):
        request_id = f"golden-{index}"
        if request_id in expected and written[request_id] != expected[request_id]:
            where = _difference(expected[request_id], written[request_id])
            differences.append(f"prompt {index}, {_short(golden.prompt)}: {where}")
    return GoldenResult(
        num_prompts=len(prompts),
        num_tokens=sum(len(tokens) for tokens in expected.values()),
        differences=tuple(differences),
    )


def _difference(expected: list[int], written: list[int]) -> str:
    pairs = zip(expected, written, strict=False)
    step = next((i for i, (want, got) in enumerate(pairs) if want != got), min(len(expected), len(written)))
    got = written[step] if step < len(written) else "nothing"
    return f"token {step} of the answer is {got} but should be {expected[step]}"


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= 32 else prompt[:29] + "...")
