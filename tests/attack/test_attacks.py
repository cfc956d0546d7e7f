"""Attacks among 32 well-behaved streams: these are told the same as without, and afterwards the server is as before."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest
from attacked_process import IS_LONG, Attacked
from attacked_server import POOL_BYTES
from attacks import (
    ATTACKS,
    PATIENCE_S,
    Answer,
    Attack,
    Attacker,
    answered,
    half_open,
    many_connections,
    pipelines,
    resets,
    slow_readers,
    well_behaved,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

NUM_STREAMS = 32
#: Tokens of each stream: as long as an attack takes to begin.
STUB_TOKENS, MODEL_TOKENS = 64, 64 if IS_LONG else 8
#: What an attack may leave in the heap (freed, but not given back) and in the log. The KV pool counts besides: a block
#: takes its memory when it is first used.
MEMORY_LEFT_BYTES, LOG_LEFT_BYTES = 48 << 20, 4 << 10
IDS = [attack.__name__ for attack in ATTACKS]


def size_of(attack: Attack) -> int:
    return ATTACKS[attack][IS_LONG]


async def undisturbed(server: Attacked, max_tokens: int) -> list[Answer]:
    return await asyncio.gather(*(well_behaved(server.port, index, max_tokens) for index in range(NUM_STREAMS)))


async def attack_among_streams(server: Attacked, attackers: dict[Attack, Attacker], max_tokens: int) -> list[Answer]:
    """The streams' answers; the attack begins once all of them have begun."""
    started = [asyncio.Event() for _ in range(NUM_STREAMS)]
    streams = [
        asyncio.create_task(well_behaved(server.port, index, max_tokens, event)) for index, event in enumerate(started)
    ]
    await asyncio.gather(*(event.wait() for event in started))
    probing = asyncio.create_task(probe(server))
    await asyncio.gather(*(attack(attacker) for attack, attacker in attackers.items()))
    probing.cancel()
    await asyncio.wait([probing])
    assert probing.cancelled(), probing.exception()
    return await asyncio.gather(*streams)


async def probe(server: Attacked) -> None:
    """Ask for /health over and over, each time as a new client."""
    while True:
        assert await answered(server.port) == (200, b'{"status":"ready"}')
        await asyncio.sleep(0.05)


async def is_empty(server: Attacked, num_descriptors: int) -> bool:
    """Whether nothing is left of any client."""
    if server.num_descriptors() > num_descriptors:
        return False
    if not server.has_model:
        return True
    _, body = await answered(server.port, b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    stats = json.loads(body)
    cache, requests = stats["kv_cache"], stats["requests"]
    return cache["used_blocks"] == requests["running"] == requests["waiting"] == 0


def check(server: Attacked, attacks: list[Attack], max_tokens: int) -> None:
    attackers = {attack: Attacker(server.port, size_of(attack)) for attack in attacks}

    async def run() -> None:
        expected = await undisturbed(server, max_tokens)
        assert await settles(num_descriptors)
        memory, log = server.memory_bytes(), server.log_bytes()
        found = await attack_among_streams(server, attackers, max_tokens)
        assert [answer.told for answer in found] == [answer.told for answer in expected]
        # The attackers have not left: what comes back, the server takes back.
        assert await settles(num_descriptors), f"descriptors: {server.num_descriptors()}, before: {num_descriptors}"
        assert await answered(server.port) == (200, b'{"status":"ready"}')
        left = server.memory_bytes() - memory
        assert left < MEMORY_LEFT_BYTES + POOL_BYTES * server.has_model, f"{left} bytes more memory than before"
        assert server.log_bytes() - log < LOG_LEFT_BYTES, server.log_tail()
        for attacker in attackers.values():
            assert all(status < 500 or status == 503 for status in attacker.statuses), attacker.statuses

    async def settles(num_descriptors: int) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not await is_empty(server, num_descriptors):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)
        return True

    num_descriptors = server.num_descriptors()
    try:
        asyncio.run(run())
    finally:
        for attacker in attackers.values():
            attacker.close()


def test_all_attacks_at_once_leave_streams_and_server_as_they_were(stub_server: Attacked) -> None:
    check(stub_server, list(ATTACKS), STUB_TOKENS)


def test_all_attacks_at_once_leave_tokens_and_blocks_as_they_were(model_server: Attacked) -> None:
    check(model_server, list(ATTACKS), MODEL_TOKENS)


@pytest.mark.skipif(not IS_LONG, reason="minutes: make test-attack")
@pytest.mark.parametrize("attack", ATTACKS, ids=IDS)
def test_an_attack_leaves_streams_and_server_as_they_were(stub_server: Attacked, attack: Attack) -> None:
    check(stub_server, [attack], STUB_TOKENS)


@pytest.mark.skipif(not IS_LONG, reason="minutes: make test-attack")
@pytest.mark.parametrize("attack", [slow_readers, half_open, resets, pipelines])  # those whose requests run
def test_an_attack_leaves_tokens_and_blocks_as_they_were(model_server: Attacked, attack: Attack) -> None:
    check(model_server, [attack], MODEL_TOKENS)


def test_the_crowd_is_larger_than_the_server_has_places() -> None:
    assert size_of(many_connections) > (1000 if IS_LONG else 100)
