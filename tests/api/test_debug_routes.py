"""Who sees what of whom on the debug routes, with the real engine and a tiny model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_engine import talk_to
from wire import error_of

from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.async_engine import AsyncEngine

KEYS = {"api_key": ("alice", "bob"), "admin_key": ("root",)}
LONG = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
FIRST, SECOND = [100, 101], [102, 103]  # prompts of a batch


async def call(http: httpx.AsyncClient, key: str, method: str, path: str, body: Any = None) -> Any:
    response = await http.request(method, path, json=body, headers={"authorization": f"Bearer {key}"})
    assert response.status_code == 200, response.text
    return response.json()


async def seen_by(http: httpx.AsyncClient, key: str, tails: Iterator[int]) -> dict[str, Any]:
    """What each route shows of a prompt that parts from an earlier one in the middle of a block."""

    def prompt() -> list[int]:
        return [50] * 22 + [next(tails)] * 10

    def chat() -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "x" * 22 + chr(next(tails)) * 10}], "max_tokens": 1}

    life = await call(http, key, "POST", "/debug/lifecycle", {"prompt": prompt(), "max_tokens": 1})
    again = await call(http, key, "GET", f"/debug/lifecycle/{life['request_id']}")
    batch = await call(http, key, "POST", "/debug/batch", {"prompts": [prompt()], "max_tokens": 1})
    await call(http, key, "POST", "/v1/chat/completions", chat())
    of_chat = await call(http, key, "POST", "/debug/lifecycle", chat())
    return {"run": life, "read": again, "batch": batch, "chat": of_chat}


@pytest.mark.parametrize("share", [True, False])
def test_the_tokens_of_the_nearest_cached_prefix_are_for_admins_alone(byte_level_path: Path, share: bool) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        tails = iter(range(60, 120))
        for key in ("alice",) if share else ("alice", "bob", "root"):
            await call(http, key, "POST", "/v1/completions", {"prompt": [50] * 22 + [7] * 10, "max_tokens": 1})
        for key in ("bob", "alice"):
            for route, shown in (await seen_by(http, key, tails)).items():
                assert "diverged" in json.dumps(shown), f"{route}: there is a neighbour to be hidden"
                assert "nearest" not in json.dumps(shown), f"{route} shows {key} the tokens of a neighbour"
        for route, shown in (await seen_by(http, "root", tails)).items():
            assert "nearest" in json.dumps(shown), f"{route} hides from an admin"

    talk_to(byte_level_path, talk, server=KEYS, share_prefix_cache=share, block_size=4)


def test_a_batch_shows_others_as_counts_and_lengths(byte_level_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        submit, gate = engine.submit, threading.Event()

        def submit_beside_another(submission: Submission) -> Any:
            """Before the first prompt of a batch one of alice's; no step runs until the second is there too."""
            is_first = list(submission.prompt_token_ids) == FIRST
            if is_first:
                engine._post(lambda loaded: _discard(gate.wait(10)))
                submit(Submission(request_id="alices", prompt_token_ids=[5] * 20, sampling=LONG, client="alice"))
            stream = submit(submission)
            if not is_first:
                gate.set()
            return stream

        monkeypatch.setattr(engine, "submit", submit_beside_another)
        for key, may_see in (("bob", False), ("root", True)):
            gate.clear()
            body = {"prompts": [FIRST, SECOND], "max_tokens": 3, "ignore_eos": True}
            batch = await call(http, key, "POST", "/debug/batch", body)
            assert any(len(step["chunks"]) == 3 for step in batch["steps"]), "they ran together"
            assert ("alices" in json.dumps(batch)) == may_see
            chunks = [chunk for step in batch["steps"] for chunk in step["chunks"]]
            assert {chunk["len"] for chunk in chunks if chunk["request_id"] in (None, "alices")} >= {1, 20}
            if (left := engine._streams.get("alices")) is not None:  # else it has come to its end
                left.abort()
            await engine.inspect(_discard)

    talk_to(byte_level_path, talk, server=KEYS, enable_prefix_caching=False)


def _discard(_: object) -> None:
    return None


def test_a_life_is_shown_to_its_client_and_to_admins(byte_level_path: Path) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        answer = await call(http, "alice", "POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})
        path = f"/debug/lifecycle/{answer['id']}"
        headers = [{"authorization": f"Bearer {key}"} for key in ("alice", "bob", "root")] + [{}]
        assert [(await http.get(path, headers=h)).status_code for h in headers] == [200, 404, 200, 401]

    talk_to(byte_level_path, talk, server=KEYS)


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/debug/batch", {"prompts": None}, "prompts"),
        ("/debug/batch", {"prompts": [[400]]}, "prompts"),
        ("/debug/batch", {"prompts": [[3] * 200]}, "prompts"),
        ("/debug/batch", {"prompts": ["a"], "max_tokens": 1000}, "max_tokens"),
        ("/debug/batch", {"prompts": ["a"], "echo": True}, "echo"),
        ("/debug/lifecycle", {"prompt": "a", "echo": True}, "echo"),
        ("/debug/lifecycle", {"prompt": [[400]]}, "prompt"),
    ],
)
def test_what_a_debug_route_does_not_take_is_refused_by_the_name_it_has_there(
    byte_level_path: Path, route: str, body: dict[str, Any], param: str
) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        error = error_of(await http.post(route, json=body), 400)
        assert error["param"] == param
        assert param != "prompts" or "prompts" in error["message"] or "the prompt " in error["message"]

    talk_to(byte_level_path, talk)
