"""Hot paths in Python: scheduler, prefix tree, batch, draws, text, events."""

from __future__ import annotations

import contextlib
import itertools
import random
from array import array
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from hot_path import Iteration, hot_path

from octavo.api.generation import News
from octavo.api.routes.chat import ChatAnswer
from octavo.api.schemas_chat import ChatRequest
from octavo.core.cache_group import FULL
from octavo.core.config import EngineConfig
from octavo.core.output import RequestOutput
from octavo.core.plan import DrawRule, SampledToken, ScheduledChunk, StepResult, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.batch import build_batch
from octavo.engine.output_processor import OutputProcessor
from octavo.kernels.native.draws import DrawPacker
from octavo.memory.group_blocks import GroupBlocks
from octavo.memory.prefix_tree import Node, PrefixTree
from octavo.scheduler.scheduler import Scheduler
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop_matcher import StopMatcher, StopStrings

SEQS = 64
BLOCK = 16
TOKEN = SampledToken(token_id=7)
DRAWN = (TOKEN,)


def request(name: str, prompt: Sequence[int], max_tokens: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=frozenset({2}),
        seed=0,
        arrival_s=0.0,
    )


def run_steps(scheduler: Scheduler, num_steps: int) -> None:
    """Plan and apply, with a model that always draws the same token and takes 20 ms."""
    for _ in range(num_steps):
        plan = scheduler.plan(1.0)
        tokens = tuple([DRAWN if chunk.draw is not None else () for chunk in plan.chunks])
        scheduler.apply(plan, StepResult(step_id=plan.step_id, tokens=tokens, forward_s=0.02))


@hot_path("scheduler: 16 steps of 64 decodes")
def _decodes() -> Iteration:
    """Plan and apply; every sequence fills a block and begins another one on the way."""
    scheduler = Scheduler.from_config(EngineConfig(), num_blocks=SEQS * 32, max_model_len=512)
    rng = random.Random(0)
    for i in range(SEQS):
        scheduler.add(request(f"{i}", [rng.randrange(40_000) for _ in range(33)], 400))
    run_steps(scheduler, 4)
    return lambda: run_steps(scheduler, BLOCK)


@hot_path("scheduler: 4 requests from queue to end, prompts in chunks")
def _admission() -> Iteration:
    """Each finds 8 of its 20 blocks in the prefix tree; the pool is full, so each also evicts."""
    config = EngineConfig(chunking="fixed", chunk_size=128, max_num_batched_tokens=256)
    scheduler = Scheduler.from_config(config, num_blocks=128, max_model_len=1024)
    rng, names = random.Random(0), itertools.count()
    head = [rng.randrange(40_000) for _ in range(8 * BLOCK)]

    def iteration() -> None:
        for _ in range(4):
            tail = [rng.randrange(40_000) for _ in range(12 * BLOCK)]
            scheduler.add(request(f"{next(names)}", head + tail, 2))
        while scheduler.has_unfinished:
            run_steps(scheduler, 1)

    return iteration


def _tree() -> tuple[PrefixTree, list[int]]:
    """A path of 64 blocks with 8 more that leave it at its middle, and the path's tokens."""
    rng = random.Random(0)
    blocks = GroupBlocks(FULL, 0, 128, BLOCK)
    tree = PrefixTree([blocks], BLOCK)

    def insert(node: Node | None, tokens: list[int]) -> Node:
        child = tree.insert(node, tuple(tokens), b"")
        blocks.attach(child, blocks.pool.allocate(), 0)
        return child

    tokens = [rng.randrange(40_000) for _ in range(64 * BLOCK)]
    node: Node | None = None
    for start in range(0, len(tokens), BLOCK):
        if start == 32 * BLOCK:
            for _ in range(8):
                insert(node, [rng.randrange(40_000) for _ in range(BLOCK)])
        node = insert(node, tokens[start : start + BLOCK])
    return tree, tokens


@hot_path("prefix tree: find 1,024 tokens", repeats=8)
def _hit() -> Iteration:
    tree, tokens = _tree()
    return lambda: tree.find(tokens, len(tokens), b"")


@hot_path("prefix tree: find, diverging inside block 32", repeats=16)
def _divergence() -> Iteration:
    tree, tokens = _tree()
    other = tokens[: 32 * BLOCK + 5] + [1] * (31 * BLOCK)
    return lambda: tree.find(other, len(other), b"")


def _decode_chunks(rng: random.Random) -> list[ScheduledChunk]:
    rule = DrawRule(params=SamplingParams(temperature=0.0), random_stream=1)
    return [
        ScheduledChunk(f"{i}", 256 + i, (rng.randrange(40_000),), (array("i", range(17 * i, 17 * i + 21)),), rule)
        for i in range(SEQS)
    ]


@hot_path("batch: 64 decodes", repeats=4)
def _decode_batch() -> Iteration:
    chunks = _decode_chunks(random.Random(0))
    return lambda: build_batch(chunks, (), BLOCK)


@hot_path("batch: 64 decodes and a chunk of 512", repeats=4)
def _mixed_batch() -> Iteration:
    rng = random.Random(0)
    tokens = [rng.randrange(40_000) for _ in range(512)]
    chunks = [*_decode_chunks(rng), ScheduledChunk("p", 40, tokens, (array("i", range(2000, 2035)),))]
    return lambda: build_batch(chunks, ((0, 1, 2, 5),), BLOCK)


@hot_path("draws: pack 64 known rules", repeats=32)
def _known_draws() -> Iteration:
    packer = DrawPacker()
    rules = [DrawRule(params=SamplingParams(temperature=0.8, top_p=0.9), random_stream=i) for i in range(SEQS)]
    packer.pack(rules)
    return lambda: packer.pack(rules)


@hot_path("draws: pack 64 rules with a history", "numpy", repeats=2)
def _history_draws() -> Iteration:
    packer = DrawPacker()
    params = SamplingParams(temperature=0.8, repetition_penalty=1.1)
    rules = [DrawRule(params=params, random_stream=i, history=list(range(128)), prompt_len=64) for i in range(SEQS)]
    return lambda: packer.pack(rules)


WORDS = [" the", " of", "ing", " lighthouse", ",", " and", " stood", "\n"]


def _vocabulary() -> Any:
    """What text code asks of a tokenizer: words, and at the end the pieces of characters that take three bytes."""
    pieces = [word.encode() for word in WORDS] + ["日".encode()[:1], "日".encode()[1:]]
    return SimpleNamespace(visible_bytes_by_id=pieces, bytes_by_id=pieces, adds_space_prefix=False)


@hot_path("detokenizer: 64 words", repeats=16)
def _words() -> Iteration:
    detokenizer = Detokenizer(_vocabulary())
    ids = [i % len(WORDS) for i in range(64)]

    def iteration() -> None:
        for token_id in ids:
            detokenizer.push(token_id)

    return iteration


@hot_path("detokenizer: 64 halves of characters", repeats=8)
def _halves() -> Iteration:
    detokenizer = Detokenizer(_vocabulary())
    ids = [len(WORDS), len(WORDS) + 1] * 32

    def iteration() -> None:
        for token_id in ids:
            detokenizer.push(token_id)

    return iteration


@hot_path("stop matcher: 64 words, no stop in sight", repeats=16)
def _no_stop() -> Iteration:
    matcher = StopMatcher(StopStrings(("Observation:", "</answer>")))

    def iteration() -> None:
        for i in range(64):
            matcher.push(WORDS[i % len(WORDS)])

    return iteration


@hot_path("stop matcher: 64 words, each beginning a stop", repeats=4)
def _near_stop() -> Iteration:
    matcher = StopMatcher(StopStrings((" the lighthouse stood still", "ing of", "\n\n")))

    def iteration() -> None:
        for i in range(64):
            matcher.push(WORDS[i % len(WORDS)])

    return iteration


@hot_path("output processor: a token of each of 64 sequences", repeats=2)
def _outputs() -> Iteration:
    processor = OutputProcessor(_vocabulary())
    for i in range(SEQS):
        processor.add(request(f"{i}", [1], 1 << 20))
    events = [TokenEvent(request_id=f"{i}", token=SampledToken(token_id=i % len(WORDS))) for i in range(SEQS)]
    return lambda: processor.process(events)


@hot_path("events: a chat stream of 64 chunks", repeats=2)
def _chat_events() -> Iteration:
    """From the engine's outputs to the bytes of server-sent events."""
    service: Any = SimpleNamespace(
        token_texts=None,
        model_name="model",
        engine=SimpleNamespace(config=SimpleNamespace(system_fingerprint="octavo_0123456789ab")),
    )
    fields = ChatRequest.parse({"messages": [{"role": "user", "content": "?"}], "stream": True})
    outputs = [RequestOutput(request_id="0", text=WORDS[i % len(WORDS)], token_ids=(i,)) for i in range(64)]

    async def news() -> AsyncGenerator[News]:
        for output in outputs:
            yield [(0, output)]

    generation: Any = SimpleNamespace(news=news)

    sent: list[int] = []

    async def stream() -> None:
        answer = ChatAnswer(service, fields)
        answer.id = "chatcmpl-0"  # not its random one
        sent[:] = [sum([len(part) async for part in answer.events(generation)])]

    def iteration() -> None:
        with contextlib.suppress(StopIteration):
            stream().send(None)  # nothing here waits, so it needs no event loop

    iteration()
    assert sent > [64 * 100]
    return iteration
