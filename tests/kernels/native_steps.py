"""A tiny engine for kernel tests: sequences with block tables, run in any chunks and any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.plan import DrawRule, SampledToken
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Backend, ModelInput, StepOutput

GREEDY = SamplingParams(temperature=0.0, logprobs=5)


@dataclass
class Seq:
    """Known tokens, how many of them are in the cache, and where."""

    tokens: list[int]
    blocks: list[int]
    params: SamplingParams = GREEDY
    stream: int = 0
    computed: int = 0
    out: list[SampledToken] = field(default_factory=list)


def step_input(
    chunks: Sequence[tuple[Seq, int]],
    block_size: int,
    *,
    logit_rows: Sequence[int] | None = None,
    copies: Sequence[Sequence[int]] = (),
) -> ModelInput:
    """A step that runs the next ``n`` positions of each sequence; by default the last row of each is wanted."""
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    tokens, positions, slots, starts, contexts = [], [], [], [0], []
    for seq, n in chunks:
        for p in range(seq.computed, seq.computed + n):
            tokens.append(seq.tokens[p])
            positions.append(p)
            slots.append(seq.blocks[p // block_size] * block_size + p % block_size)
        starts.append(len(tokens))
        contexts.append(seq.computed + n)
    width = max(len(seq.blocks) for seq, _ in chunks)
    return ModelInput.of(
        token_ids=tokens,
        positions=positions,
        slot_mapping=slots,
        logit_rows=[end - 1 for end in starts[1:]] if logit_rows is None else logit_rows,
        query_starts=starts,
        context_lens=contexts,
        block_tables=[seq.blocks + [0] * (width - len(seq.blocks)) for seq, _ in chunks],
        copies=copies,
    )


def advance(backend: Backend, chunks: Sequence[tuple[Seq, int]], block_size: int) -> StepOutput:
    """Run one step; sequences whose last known token was run get the drawn one appended."""
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    step = step_input(chunks, block_size)
    result = backend.run(step, [DrawRule(params=seq.params, random_stream=seq.stream) for seq, _ in chunks])
    for (seq, n), token in zip(chunks, result.tokens, strict=True):
        seq.computed += n
        if seq.computed == len(seq.tokens):
            assert token is not None
            seq.out.append(token)
            seq.tokens.append(token.token_id)
    return result
