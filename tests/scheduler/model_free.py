"""A stand-in for the model, to test schedules without one.

A KV slot holds a number that depends on every token up to its position (and on the request's cache salt), as real KV
does, and the next token is a hash of all those numbers *read back through the block tables*: all of them in a full
group, those that the window shows in a window group, the one number that a state group keeps. A wrong block, a stale
one, a dropped copy or a write into somebody else's block changes the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as AnySequence
from dataclasses import dataclass
from zlib import crc32

from octavo.core.cache_group import FULL, CacheGroup
from octavo.core.plan import SampledToken, ScheduledChunk, StepPlan, StepResult, TokenEvent
from octavo.core.request import Request, mix64
from octavo.core.sampling_params import SamplingParams
from octavo.memory.kv_cache_manager import KVCacheManager
from octavo.scheduler.chunk_sizer import ChunkSizer, FixedChunkSizer, StepBudget, StepSituation
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.sequence import Sequence

VOCAB = 7  # small, so that unrelated sequences often agree for a while


Context = tuple[tuple[int, ...], ...]  # of each group: the numbers that one position sees


def kv_number(salt: int, before: Context, token: int, position: int) -> int:
    """What the slots of ``token`` at ``position`` hold where the position before it sees ``before``."""
    return hash((salt, before, token, position))


def seen(group: CacheGroup, numbers: AnySequence[int], end: int) -> tuple[int, ...]:
    """What a query at ``end - 1`` sees of positions [0, end), whose numbers these are."""
    if group.kind == "state":
        state = 0
        for number in numbers[:end]:
            state = next_state(state, number)
        return (state,)
    return tuple(numbers[max(0, end - group.window) if group.kind == "window" else 0 : end])


def seen_before(group: CacheGroup, numbers: AnySequence[int], position: int) -> tuple[int, ...]:
    """What a query at ``position`` sees of the positions before it; of a full group the last number stands for all."""
    if group.kind == "full":
        return tuple(numbers[position - 1 : position]) if position else ()
    if group.kind == "state":
        return seen(group, numbers, position)
    return tuple(numbers[max(0, position - group.window + 1) : position])


def next_state(state: int, number: int) -> int:
    return hash((state, number))


def salt_number(salt: bytes) -> int:
    """Stands before position 0, so that KV from under another salt is wrong. (Python's hash of bytes is randomised.)"""
    return int.from_bytes(salt, "little")


def drawn_token(context: Context, stream: int, banned: AnySequence[int]) -> int:
    """The next token: a function of every number of the context and of the request's random stream."""
    number = hash((context, stream))
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[mix64(number & 0xFFFFFFFFFFFFFFFF) % len(allowed)]


def prompt_logprob(context: Context, token: int) -> SampledToken:
    return SampledToken(token_id=token, logprob=-(hash((context, token)) % 1000) / 100)


@dataclass(frozen=True)
class Expected:
    """What a request must get, computed with no scheduler, no blocks and no batch."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | None
    prompt_logprobs: list[SampledToken]


def compute_alone(request: Request, groups: AnySequence[CacheGroup] = (FULL,)) -> Expected:
    tokens, kv = list(request.prompt_token_ids), list[int]()
    salt = salt_number(request.cache_salt)

    def context(end: int) -> Context:
        return tuple(seen(group, kv, end) for group in groups)

    def run(token: int) -> None:
        position = len(kv)
        kv.append(kv_number(salt, tuple(seen_before(group, kv, position) for group in groups), token, position))

    for token in tokens:
        run(token)
    logprobs = []
    if request.sampling.prompt_logprobs is not None:
        logprobs = [prompt_logprob(context(p), tokens[p]) for p in range(1, len(tokens))]
    output: list[int] = []
    while len(output) < request.max_tokens:
        banned = request.stop_token_ids if len(output) < request.sampling.min_tokens else ()
        token = drawn_token(context(len(kv)), request.random_stream, sorted(banned))
        output.append(token)
        run(token)
        if token in request.stop_token_ids and len(output) >= request.sampling.min_tokens:
            return Expected(output, "stop", token if token in request.sampling.stop_token_ids else None, logprobs)
    return Expected(output, "length", None, logprobs)


class StepCrash(Exception):
    """What a backend raises when a whole step goes wrong."""


class ModelFreeRunner:
    """Executes plans on slots that hold numbers. Free blocks are filled with junk after every step."""

    def __init__(self, manager: KVCacheManager, rng: random.Random) -> None:
        self.manager = manager
        self.groups = manager.groups
        self.size = manager.block_size
        self.rng = rng
        # of each group: blocks of numbers; a state group has one number per slot
        widths = [1 if group.kind == "state" else self.size for group in self.groups]
        self.junk = [
            [[-1 - block] * width for block in range(count)]
            for width, count in zip(widths, manager.num_blocks, strict=True)
        ]
        self.blocks = [[list(junk) for junk in group] for group in self.junk]
        self.salts: dict[str, bytes] = {}

    def poison_free_blocks(self) -> None:
        for group, blocks in enumerate(self.manager._blocks):
            for block in blocks.pool._free:
                self.blocks[group][block][:] = self.junk[group][block]

    def execute(self, plan: StepPlan, *, failed: AnySequence[int] = (), crash: bool = False) -> StepResult:
        copies = list(plan.block_copies)
        sources, targets = {copy[:2] for copy in copies}, {(group, dst) for group, _, dst, _ in copies}
        assert not sources & targets, "copies depend on their order"
        self.rng.shuffle(copies)
        for group, src, dst, num_tokens in copies:
            assert 0 < num_tokens < self.size
            self.blocks[group][dst] = self.blocks[group][src][:num_tokens] + self.junk[group][dst][num_tokens:]
        for group in range(len(self.groups)):
            self.check_writers(plan, group)
        broken = range(len(plan.chunks)) if crash else failed
        # a chunk with several draws fails at any of them
        cut = {i: self.rng.randrange(n) if (n := len(plan.chunks[i].drawing)) > 1 else 0 for i in broken}
        outcomes = [self.run(chunk, broken_from=cut.get(i)) for i, chunk in enumerate(plan.chunks)]
        if crash:
            raise StepCrash
        return StepResult(
            step_id=plan.step_id,
            tokens=tuple(tokens[: cut.get(i)] for i, (tokens, _) in enumerate(outcomes)),
            prompt_logprobs=tuple(logprobs for _, logprobs in outcomes),
            failed=dict.fromkeys(failed, "not_finite"),
            forward_s=0.01 + 0.001 * sum(len(chunk.token_ids) for chunk in plan.chunks),
        )

    def check_writers(self, plan: StepPlan, group: int) -> None:
        """No block that one sequence writes in this step is visible to another."""
        tables = [list(chunk.block_tables[group]) for chunk in plan.chunks]
        if self.groups[group].kind == "state":
            written = [{table[1]} for table in tables]
        else:
            written = [set(t[c.start // self.size :]) for t, c in zip(tables, plan.chunks, strict=True)]
        for i, blocks in enumerate(written):
            assert min(blocks) >= 0, "writes to a block that it does not have"
            for j, table in enumerate(tables):
                assert i == j or not blocks & set(table), f"{blocks & set(table)} written by one, seen by another"

    def run(
        self, chunk: ScheduledChunk, *, broken_from: int | None = None
    ) -> tuple[tuple[SampledToken, ...], tuple[SampledToken, ...]]:
        """Write what the chunk's positions leave behind, each after having read what those before it left.

        broken_from: junk from that token of the chunk on. -> its draws, each by the rule of its position, and logprobs
        """
        salt, tables = salt_number(self.salts[chunk.request_id]), chunk.block_tables
        states = [0] * len(self.groups)
        for group, table in enumerate(tables):
            if self.groups[group].kind == "state" and chunk.start:
                states[group] = self.blocks[group][table[0]][0]
        logprobs, drawn, wanted = list[SampledToken](), list[SampledToken](), chunk.want_logprobs
        for position, token in enumerate(chunk.token_ids, chunk.start):
            before = tuple(self.look(group, tables, states, position, position) for group in range(len(tables)))
            broken = broken_from is not None and position >= chunk.start + broken_from
            number = self.rng.getrandbits(60) if broken else kv_number(salt, before, token, position)
            for group, table in enumerate(tables):
                if self.groups[group].kind == "state":
                    states[group] = next_state(states[group], number)
                else:
                    block, offset = divmod(position, self.size)
                    self.blocks[group][table[block]][offset] = number
            asked = wanted is not None and position + 1 in wanted.positions
            if not asked and position not in chunk.drawing:
                continue
            context = tuple(self.look(group, tables, states, position, position + 1) for group in range(len(tables)))
            if wanted is not None and asked:
                logprobs.append(prompt_logprob(context, wanted.token_ids[len(logprobs)]))
            if position in chunk.drawing:
                rule = chunk.draw.for_position(position + 1)  # type: ignore[union-attr]
                token_id = drawn_token(context, rule.random_stream, rule.banned_token_ids)
                drawn.append(SampledToken(token_id=token_id))
        for group, table in enumerate(tables):
            if self.groups[group].kind == "state":
                self.blocks[group][table[1]][0] = states[group]
        return tuple(drawn), tuple(logprobs)

    def look(
        self, group: int, tables: AnySequence[AnySequence[int]], states: AnySequence[int], position: int, end: int
    ) -> tuple[int, ...]:
        """What a query at ``position`` sees of [0, end), through the block table. (As ``seen`` and ``seen_before``.)"""
        kind = self.groups[group].kind
        if kind == "state":
            return (states[group],)
        start = max(0, position - self.groups[group].window + 1) if kind == "window" else 0
        if kind == "full" and end == position:
            start = max(0, position - 1)
        numbers = []
        for at in range(start, end):
            block, offset = divmod(at, self.size)
            assert tables[group][block] >= 0, f"a query at {position} sees a block that was given back"
            numbers.append(self.blocks[group][tables[group][block]][offset])
        return tuple(numbers)


class Guesser:
    """Guesses right, wrong, half right, too much or nothing."""

    def __init__(self, rng: random.Random, groups: AnySequence[CacheGroup] = (FULL,)) -> None:
        self.rng, self.groups = rng, groups
        self.truth: dict[str, list[int]] = {}

    def propose(self, seq: Sequence, most: int) -> list[int]:
        if seq.request_id not in self.truth:
            self.truth[seq.request_id] = compute_alone(seq.request, self.groups).tokens
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
