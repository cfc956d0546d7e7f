"""A tiny engine for kernel tests: sequences with block tables, run in any chunks and any company."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from octavo.core.plan import SampledToken
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import Backend, Draw, ModelInput, StepOutput

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
    chunks: Sequence[tuple[Seq, int]], block_size: int, *, logit_rows: Sequence[int] | None = None, copies: object = ()
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
    tables = np.zeros((len(chunks), width), np.int32)
    for row, (seq, _) in zip(tables, chunks, strict=True):
        row[: len(seq.blocks)] = seq.blocks
    rows = [end - 1 for end in starts[1:]] if logit_rows is None else list(logit_rows)
    return ModelInput(
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        logit_rows=np.array(rows, np.int32),
        slot_mapping=np.array(slots, np.int32),
        block_tables=tables,
        query_starts=np.array(starts, np.int32),
        context_lens=np.array(contexts, np.int32),
        num_one_query_seqs=sum(n == 1 for _, n in chunks),
        copies=np.array(copies, np.int32).reshape(-1, 3),
    )


def advance(backend: Backend, chunks: Sequence[tuple[Seq, int]], block_size: int) -> StepOutput:
    """Run one step; sequences whose last known token was run get the drawn one appended."""
    chunks = sorted(chunks, key=lambda chunk: chunk[1] > 1)
    step = step_input(chunks, block_size)
    draws = [Draw(params=seq.params, stream=seq.stream, position=seq.computed + n) for seq, n in chunks]
    result = backend.run(step, draws)
    for (seq, n), token in zip(chunks, result.tokens, strict=True):
        seq.computed += n
        if seq.computed == len(seq.tokens):
            assert token is not None
            seq.out.append(token)
            seq.tokens.append(token.token_id)
    return result
