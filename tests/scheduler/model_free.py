"""A stand-in for the model, to test schedules without one.

A KV slot holds a number that depends on every token up to its position (and on the request's cache salt), as real KV
does, and the next token is a hash of all those numbers *read back through the block table*. A wrong block, a stale one,
a dropped copy or a write into somebody else's block changes the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from zlib import crc32

from octavo.core.plan import SampledToken, ScheduledChunk, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request, mix64
from octavo.core.sampling_params import SamplingParams
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import ChunkSizer, FixedChunkSizer, StepBudget, StepSituation
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

VOCAB = 7  # small, so that unrelated sequences often agree for a while


def kv_number(before: int, token: int, position: int) -> int:
    """What the slot of ``token`` at ``position`` holds after the slot before it held ``before``."""
    return hash((before, token, position))


def salt_number(salt: bytes) -> int:
    """Stands before position 0, so that KV from under another salt is wrong. (Python's hash of bytes is randomised.)"""
    return int.from_bytes(salt, "little")


def drawn_token(context: AnySequence[int], stream: int, banned: AnySequence[int]) -> int:
    """The next token: a function of every slot of the context and of the request's random stream."""
    number = hash((tuple(context), stream))
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[mix64(number & 0xFFFFFFFFFFFFFFFF) % len(allowed)]


def prompt_logprob(context: AnySequence[int], token: int) -> SampledToken:
    return SampledToken(token_id=token, logprob=-(hash((tuple(context), token)) % 1000) / 100)


@dataclass(frozen=True)
class Expected:
    """What a request must get, computed with no scheduler, no blocks and no batch."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | None
    prompt_logprobs: list[SampledToken]


def compute_alone(request: Request) -> Expected:
    tokens, kv = list(request.prompt_token_ids), []
    number = salt_number(request.cache_salt)
    for position, token in enumerate(tokens):
        number = kv_number(number, token, position)
        kv.append(number)
    logprobs = []
    if request.sampling.prompt_logprobs is not None:
        logprobs = [prompt_logprob(kv[:p], tokens[p]) for p in range(1, len(tokens))]
    output: list[int] = []
    while len(output) < request.max_tokens:
        banned = request.stop_token_ids if len(output) < request.sampling.min_tokens else ()
        token = drawn_token(kv, request.random_stream, sorted(banned))
        output.append(token)
        number = kv_number(number, token, len(kv))
        kv.append(number)
        if token in request.stop_token_ids and len(output) >= request.sampling.min_tokens:
            return Expected(output, "stop", token if token in request.sampling.stop_token_ids else None, logprobs)
    return Expected(output, "length", None, logprobs)


class StepCrash(Exception):
    """What a backend raises when a whole step goes wrong."""


class ModelFreeRunner:
    """Executes plans on slots that hold numbers. Free blocks are filled with junk after every step."""

    def __init__(self, manager: KVCacheManager, rng: random.Random) -> None:
        self.manager = manager
        self.size = manager.block_size
        self.rng = rng
        self.junk = [[-1 - block] * self.size for block in range(manager.num_blocks)]
        self.blocks = [list(junk) for junk in self.junk]
        self.salts: dict[str, bytes] = {}

    def poison_free_blocks(self) -> None:
        for block in self.manager._pool._free:
            self.blocks[block][:] = self.junk[block]

    def execute(self, plan: StepPlan, *, failed: AnySequence[int] = (), crash: bool = False) -> StepResult:
        copies = list(plan.block_copies)
        assert not {src for src, _, _ in copies} & {dst for _, dst, _ in copies}, "copies depend on their order"
        self.rng.shuffle(copies)
        for src, dst, num_tokens in copies:
            assert 0 < num_tokens < self.size
            self.blocks[dst] = self.blocks[src][:num_tokens] + self.junk[dst][num_tokens:]
        self.check_writers(plan)
        broken = range(len(plan.chunks)) if crash else failed
        # a chunk with several draws fails at any of them
        cut = {i: self.rng.randrange(n) if (n := len(plan.chunks[i].drawing)) > 1 else 0 for i in broken}
        for i, chunk in enumerate(plan.chunks):
            self.write(chunk, broken_from=cut.get(i))
        if crash:
            raise StepCrash
        return StepResult(
            step_id=plan.step_id,
            tokens=tuple(self.draw(chunk)[: cut.get(i)] for i, chunk in enumerate(plan.chunks)),
            prompt_logprobs=tuple(map(self.prompt_logprobs, plan.chunks)),
            failed=dict.fromkeys(failed, "not_finite"),
            forward_s=0.01 + 0.001 * sum(len(chunk.token_ids) for chunk in plan.chunks),
        )

    def check_writers(self, plan: StepPlan) -> None:
        """No block that one sequence writes in this step is visible to another."""
        tables = [list(chunk.block_ids) for chunk in plan.chunks]
        written = [set(t[c.start // self.size :]) for t, c in zip(tables, plan.chunks, strict=True)]
        for i, blocks in enumerate(written):
            for j, table in enumerate(tables):
                assert i == j or not blocks & set(table), f"{blocks & set(table)} written by one, seen by another"

    def write(self, chunk: ScheduledChunk, *, broken_from: int | None = None) -> None:
        """broken_from: junk from that token of the chunk on."""
        number = salt_number(self.salts[chunk.request_id])
        if chunk.start:
            block, offset = divmod(chunk.start - 1, self.size)
            number = self.blocks[chunk.block_ids[block]][offset]
        for position, token in enumerate(chunk.token_ids, chunk.start):
            broken = broken_from is not None and position >= chunk.start + broken_from
            number = self.rng.getrandbits(60) if broken else kv_number(number, token, position)
            block, offset = divmod(position, self.size)
            self.blocks[chunk.block_ids[block]][offset] = number

    def context(self, chunk: ScheduledChunk) -> list[int]:
        context = [number for block in chunk.block_ids for number in self.blocks[block]][: chunk.end]
        assert len(context) == chunk.end, "the block table does not cover the chunk"
        return context

    def draw(self, chunk: ScheduledChunk) -> tuple[SampledToken, ...]:
        """Each draw sees the slots up to its own, and the rule of its position."""
        context, drawn = self.context(chunk), []
        for position in chunk.drawing:
            rule = chunk.draw.for_position(position + 1)  # type: ignore[union-attr]
            seen = context[: position + 1]
            drawn.append(SampledToken(token_id=drawn_token(seen, rule.random_stream, rule.banned_token_ids)))
        return tuple(drawn)

    def prompt_logprobs(self, chunk: ScheduledChunk) -> tuple[SampledToken, ...]:
        if (wanted := chunk.want_logprobs) is None:
            return ()
        context = self.context(chunk)
        return tuple(
            prompt_logprob(context[:p], token) for p, token in zip(wanted.positions, wanted.token_ids, strict=True)
        )


class Guesser:
    """Guesses right, wrong, half right, too much or nothing."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.truth: dict[str, list[int]] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        if seq.request_id not in self.truth:
            self.truth[seq.request_id] = compute_alone(seq.request).tokens
        right = self.truth[seq.request_id][seq.num_output :]
        wrong = [self.rng.randrange(VOCAB) for _ in range(most + 2)]
        kind = self.rng.choice(("right", "right", "wrong", "half", "none"))
        if kind == "half":
            cut = self.rng.randint(0, len(right))
            return right[:cut] + wrong
        return {"right": right + wrong, "wrong": wrong, "none": []}[kind][: self.rng.choice((1, 2, most, most + 2))]


class RandomChunkSizer(ChunkSizer):
    """Any number of prefill tokens from 1 on: whatever a real sizer might choose."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def begin(self, situation: StepSituation) -> StepBudget:
        tokens = min(self.rng.choice((1, 2, 3, 5, 8, 13, 100)), situation.hard_limit)
        return RandomStepBudget(tokens, self.rng) if self.rng.random() < 0.5 else StepBudget(tokens, "random")


class RandomStepBudget(StepBudget):
    """Gives each chunk any part of what is left, so that several prefills are in progress at once."""

    def __init__(self, tokens: int, rng: random.Random) -> None:
        super().__init__(tokens, "random")
        self.rng = rng

    def allow(self, start: int, wanted: int) -> tuple[int, str]:
        tokens, reason = super().allow(start, wanted)
        some = self.rng.choice((1, 2, 3, 100))
        return (some, "random") if some < tokens else (tokens, reason)


SIZE = 4  # block size of a Driver


def request(
    request_id: str, prompt: list[int] | int, max_tokens: int = 4, *, arrival_s: float = 0.0, **more: object
) -> Request:
    """A request; an int for the prompt means that many tokens that nobody else has."""
    if isinstance(prompt, int):
        prompt = [1_000 * (crc32(request_id.encode()) % 1_000_000) + i for i in range(prompt)]
    sampling = more.pop("sampling", SamplingParams())
    assert isinstance(sampling, SamplingParams)
    fields: dict[str, object] = {
        "request_id": request_id,
        "prompt_token_ids": tuple(prompt),
        "sampling": sampling,
        "max_tokens": max_tokens,
        "stop_token_ids": frozenset(sampling.stop_token_ids),
        "seed": 0,
        "arrival_s": arrival_s,
        **more,
    }
    return Request(**fields)  # type: ignore[arg-type]


class Driver:
    """A scheduler, its model-free runner, and what came out."""

    def __init__(self, num_blocks: int = 64, *, chunk_size: int = 512, **more: object) -> None:
        more.setdefault("sizer", FixedChunkSizer(chunk_size))
        self.scheduler = Scheduler(KVCacheManager(num_blocks, SIZE), **more)  # type: ignore[arg-type]
        self.runner = ModelFreeRunner(self.scheduler.manager, random.Random(0))
        self.events: list[TokenEvent] = []
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def add(self, *requests: Request) -> None:
        for new in requests:
            self.runner.salts[new.request_id] = new.cache_salt
            self.scheduler.add(new)

    def step(self) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        self.events += self.scheduler.apply(plan, self.runner.execute(plan))
        self.scheduler.manager.check_integrity()
        self.plans.append(plan)
        self.now += 0.01
        return plan

    def run(self) -> None:
        while self.scheduler.has_unfinished:
            self.step()

    def tokens(self, request_id: str) -> list[int]:
        return [e.token.token_id for e in self.events if e.request_id == request_id and e.token is not None]

    def end(self, request_id: str) -> TokenEvent:
        (event,) = [e for e in self.events if e.request_id == request_id and e.finish_reason is not None]
        return event

    def lengths(self, plan: StepPlan) -> dict[str, int]:
        return {chunk.request_id: len(chunk.token_ids) for chunk in plan.chunks}

    def computed(self, request_id: str) -> int:
        """Positions run for it, over all plans."""
        return sum(self.lengths(plan).get(request_id, 0) for plan in self.plans)
