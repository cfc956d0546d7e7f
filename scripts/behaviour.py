"""Record what the engine answers to varied requests, and compare two records to the bit: for refactorings.

    python scripts/behaviour.py record /tmp/old.json        # in the tree of the old commit (this file copied there)
    python scripts/behaviour.py record /tmp/new.json        # in the tree of the new one, on the same machine
    python scripts/behaviour.py compare /tmp/old.json /tmp/new.json

200 requests (every sampling field, stops, n, prompt logprobs, prefix hits, preemption) under both numerics and both
kinds of KV cache; then some over HTTP, whole and streamed, with echo. ``OCTAVO_ISA`` chooses the instruction set:
record once for each. Chunks are of a fixed size, so that every decision repeats. It uses the public API alone.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo import LLM, AsyncEngine, EngineConfig, SamplingParams
from octavo.core.config import ServerConfig

NUM_REQUESTS = 200
SETTINGS = [
    {"numerics": numerics, "kv_cache_dtype": kv} for numerics in ("exact", "fast") for kv in ("float32", "bfloat16")
]
IDS = range(300, 40_000)
IGNORED = {"timings", "id", "created", "system_fingerprint"}


def prompt(rng: random.Random, heads: list[list[int]]) -> list[int]:
    """Mostly one that begins like others."""
    head = rng.choice(heads)[: rng.choice([0, 7, 16, 64, 150])]
    return head + rng.choices(IDS, k=rng.choice([1, 3, 17, 40]))


def sampling(rng: random.Random) -> dict[str, Any]:
    """Some of the fields, each often enough."""
    fields: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.3]),
        "seed": rng.randrange(2**32),
        "max_tokens": rng.choice([0, 1, 2, 12, 40]),
        "ignore_eos": rng.random() < 0.7,
    }
    optional: dict[str, Any] = {
        "top_k": rng.choice([1, 5, 40]),
        "top_p": rng.choice([0.1, 0.8, 0.95]),
        "min_p": rng.choice([0.02, 0.2]),
        "typical_p": rng.choice([0.3, 0.9]),
        "xtc_probability": 0.5,
        "repetition_penalty": rng.choice([0.8, 1.2]),
        "presence_penalty": rng.choice([-0.5, 0.8]),
        "frequency_penalty": rng.choice([-0.5, 0.8]),
        "dry_multiplier": 0.8,
        "logit_bias": {rng.choice(IDS): rng.choice([-5.0, 5.0]) for _ in range(4)},
        "allowed_token_ids": rng.sample(IDS, 50),
        "bad_words_token_ids": [rng.sample(IDS, rng.choice([1, 2])) for _ in range(5)],
        "stop_token_ids": rng.sample(IDS, 200),
        "stop": [rng.choice(["e", " the", "\n", "ing", ". "]), "zzz"],
        "include_stop_str_in_output": True,
        "logprobs": rng.choice([0, 1, 5]),
        "prompt_logprobs": rng.choice([0, 3]),
    }
    fields |= {name: value for name, value in optional.items() if rng.random() < 0.15}
    if fields["max_tokens"] > 2 and rng.random() < 0.2:
        fields["min_tokens"] = 2
    return fields


def offline(model: str, setting: dict[str, str]) -> list[Any]:
    """In three calls: everything at once, one by one, and again with a pool that runs dry."""
    rng = random.Random(0)
    heads = [rng.choices(IDS, k=150) for _ in range(4)]
    asked = [(prompt(rng, heads), sampling(rng), rng.choice([1, 1, 1, 2, 4])) for _ in range(NUM_REQUESTS)]
    found = []
    for memory in (256 << 20, 24 << 20):
        config = EngineConfig(
            model=model, max_model_len=256, max_num_seqs=32, chunking="fixed", chunk_size=96, kv_cache_memory=memory,
            **setting,
        )  # type: ignore[arg-type]  # fmt: skip
        with LLM(config=config) as llm:
            for n in (1, 2, 4):
                chosen = [(ids, SamplingParams(**fields)) for ids, fields, wanted in asked if wanted == n]
                results = llm.generate([ids for ids, _ in chosen], [params for _, params in chosen], n=n)
                found += [plain(dataclasses.asdict(result)) for result in results]
            ids, fields, _ = asked[0]
            found += [plain(dataclasses.asdict(llm.generate(ids, SamplingParams(**fields))[0]))]
    return found


def over_http(model: str) -> list[Any]:
    """One request after the other, through the application."""
    import httpx

    from octavo.api import create_app

    rng = random.Random(1)
    heads = [rng.choices(IDS, k=150) for _ in range(2)]
    found = []

    async def talk() -> None:
        engine = AsyncEngine(EngineConfig(model=model, max_model_len=512, chunking="fixed", kv_cache_memory=64 << 20))
        await engine.start()
        try:
            transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as http:
                for number in range(40):
                    fields = sampling(rng)
                    for name in ("bad_words_token_ids", "prompt_logprobs", "min_tokens"):
                        fields.pop(name, None)
                    body = {"prompt": prompt(rng, heads), "echo": number % 3 == 0, "n": 1 + number % 2, **fields}
                    found.append(plain((await http.post("/v1/completions", json=body)).json()))
                    stream = await http.post("/v1/completions", json={**body, "stream": True})
                    events = [line for line in stream.text.splitlines() if line.startswith("data: {")]
                    found.append(joined(plain(json.loads(line.removeprefix("data: "))) for line in events))
        finally:
            await engine.stop()

    asyncio.run(talk())
    return found


def joined(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A stream's choices as wholes: how much comes in one event depends on when it was read."""
    choices: dict[str, Any] = {}
    for event in events:
        for piece in event.get("choices", [event]):
            whole = choices.setdefault(str(piece.get("index")), {"text": ""})
            whole["text"] += piece.get("text", "")
            whole |= {name: value for name, value in piece.items() if name not in ("text", "logprobs")}
            for name, column in (piece.get("logprobs") or {}).items():
                whole.setdefault(name, []).extend(column)
    return choices


def plain(value: Any) -> Any:
    """What JSON can hold, without what differs from run to run; numbers to the last bit."""
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items() if key not in IGNORED}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value.hex() if isinstance(value, float) else value


def record(path: Path, model: str) -> None:
    answers = {json.dumps(setting, sort_keys=True): offline(model, setting) for setting in SETTINGS}
    answers["http"] = over_http(model)
    path.write_text(json.dumps(answers))
    print(f"{path}: {sum(map(len, answers.values()))} answers")


def compare(old: Path, new: Path) -> bool:
    """Say where they differ."""
    before, after = json.loads(old.read_text()), json.loads(new.read_text())
    same = before.keys() == after.keys()
    for name in before.keys() & after.keys():
        differ = [i for i, (a, b) in enumerate(zip(before[name], after[name], strict=False)) if a != b]
        if differ or len(before[name]) != len(after[name]):
            same = False
            print(f"{name}: {len(differ)} of {len(before[name])} answers differ, the first is number {differ[:1]}")
        else:
            print(f"{name}: {len(before[name])} answers, all the same")
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    if args.what == "record":
        record(args.files[0], args.model)
    elif not compare(*args.files):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
