"""What users of vLLM and llama.cpp expect of a server, with the real engine and a tiny model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from real_engine import talk_to
from wire import CHAT, COMPLETIONS, HELLO, answer_of, error_of

from octavo.engine.async_engine import AsyncEngine
from weights.gguf_writer import random_llama

BROKEN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}"


async def completed(http: httpx.AsyncClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **fields}
    return dict(answer_of(await http.post(COMPLETIONS, json=body)))


def test_a_seed_of_minus_one_is_a_new_one_each_time_and_any_other_repeats(byte_level_path: Path) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        async def tokens(seed: int) -> tuple[int, ...]:
            [choice] = (await completed(http, "a", seed=seed))["choices"]
            return tuple(choice["token_ids"])

        assert len({await tokens(-1) for _ in range(3)}) == 3
        for seed in (-2, 0, 2**64 - 1):
            assert await tokens(seed) == await tokens(seed)

    talk_to(byte_level_path, talk)


def test_a_typed_bos_is_not_doubled_and_a_log_line_says_so_once(
    sentencepiece_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        async def prompt_ids(prompt: Any, **fields: Any) -> list[int]:
            return list((await completed(http, prompt, max_tokens=1, **fields))["choices"][0]["prompt_token_ids"])

        plain = await prompt_ids("ab")
        assert caplog.text == ""
        assert plain[0] == engine.tokenizer.bos_token_id
        assert await prompt_ids("<s>ab") == plain
        assert await prompt_ids("<s><s>ab") == [1, *plain], "one is the model's, a second one is meant"
        assert await prompt_ids("<s>ab", add_special_tokens=False) == plain
        assert await prompt_ids("ab<s>") == [*plain, 1]
        assert await prompt_ids([1, *plain]) == [1, *plain], "ids are taken as they are"
        assert caplog.text.count("begins with '<s>'") == 1

    with caplog.at_level(logging.INFO, "octavo"):
        talk_to(sentencepiece_path, talk)


def test_a_chat_template_that_writes_bos_gets_one(tmp_path: Path, sentencepiece_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}")

    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        body = {"messages": HELLO, "max_tokens": 1, "return_token_ids": True}
        answer = answer_of(await http.post(CHAT, json=body))
        assert answer["prompt_token_ids"].count(1) == 1
        assert answer["prompt_token_ids"][0] == 1

    talk_to(sentencepiece_path, talk, chat_template=str(template))


def test_a_model_with_a_broken_chat_template_completes_and_refuses_to_chat_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "broken.gguf"
    random_llama(path, extra_metadata={"tokenizer.chat_template": BROKEN_TEMPLATE})

    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        assert "chat template does not compile" in caplog.text
        assert (await completed(http, "a"))["usage"]["completion_tokens"] == 12
        for stream in (False, True):
            error = error_of(await http.post(CHAT, json={"messages": HELLO, "stream": stream}), 400)
            assert error["param"] == "messages"
            assert "does not compile" in error["message"]
            assert "endfor" in error["message"], "jinja's own reason"
            assert "/v1/completions" in error["message"]

    talk_to(path, talk)
    whole = tmp_path / "whole.jinja"
    whole.write_text(BROKEN_TEMPLATE + "{% endfor %}")

    async def chat(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        answer_of(await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}))

    talk_to(path, chat, chat_template=str(whole))


def test_completion_tokens_count_what_a_stop_string_cut(byte_level_path: Path) -> None:
    """Every token drawn is counted, by the answer, the trace and the stats alike; text and ids end at the cut."""

    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        fields = {"logit_bias": {str(3 + ord("x")): 100}, "temperature": 0, "stop": "xx"}
        stopped = await completed(http, "a", logprobs=0, **fields)
        [choice] = stopped["choices"]
        assert (choice["text"], choice["token_ids"], choice["logprobs"]["tokens"]) == ("", [], [])
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "xx")
        assert stopped["usage"]["completion_tokens"] == 2
        life = (await http.get(f"/debug/lifecycle/{stopped['id']}")).json()
        assert life["summary"]["output_tokens"] == 2

    talk_to(byte_level_path, talk)
