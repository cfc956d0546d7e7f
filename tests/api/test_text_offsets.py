"""``text_offset`` of completions: where each token's text begins in the text that the client sees."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from real_engine import talk_to
from wire import COMPLETIONS, answer_of, error_of, events_of

from octavo.api.logprobs import prompt_offsets
from octavo.api.routes import completions
from octavo.core.steps import finish
from octavo.engine.async_engine import AsyncEngine
from octavo.text.tokenizer import Tokenizer
from octavo.text.vocabulary import SpecialToken, SpecialTokenMatcher
from weights.gguf_writer import SENTENCEPIECE_PIECES, Typed, sentencepiece_metadata, tokenizer_metadata

BOS = 1
IDS = {piece: 259 + index for index, piece in enumerate(SENTENCEPIECE_PIECES)}
BYTE = 3  # id of the token for byte 0


async def choices_of(http: httpx.AsyncClient, prompt: Any, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """Per choice its text and the logprobs' columns; of a stream, its pieces joined."""
    body = {"prompt": prompt, "logprobs": 0, "stream": stream, "seed": 5, "ignore_eos": True, **fields}
    response = await http.post(COMPLETIONS, json=body)
    if not stream:
        return list(answer_of(response)["choices"])
    choices: dict[int, dict[str, Any]] = {}
    for event in events_of(response):
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"text": "", "logprobs": {}})
            choice["text"] += piece["text"]
            for name, column in (piece["logprobs"] or {}).items():
                choice["logprobs"].setdefault(name, []).extend(column)
    return [choice for _, choice in sorted(choices.items())]


def spans_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    """(token, the text from its offset to the next one's)."""
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    assert offsets == sorted(offsets)
    return [
        (token, choice["text"][start:end])
        for token, start, end in zip(choice["logprobs"]["tokens"], offsets, offsets[1:], strict=False)
    ]


def check_answer(choice: dict[str, Any], num_prompt: int) -> None:
    """Behind the prompt every token stands where its text is."""
    for token, span in spans_of(choice)[num_prompt:]:
        if token.startswith("bytes:"):
            assert span in ("", "\ufffd") or not span.isascii()
        elif token in ("<unk>", "<s>", "</s>"):
            assert span in ("", "\ufffd"), "markers have no text; a character broken off before one may end here"
        else:
            assert span.removeprefix("\ufffd") == token


#: prompt -> (token, its part of the echoed prompt); spelt out by hand
SENTENCEPIECE_PROMPTS: list[tuple[Any, list[tuple[str, str]]]] = [
    ("ab", [("<s>", ""), (" ab", "ab")]),
    (" ab", [("<s>", ""), (" ", ""), (" ab", " ab")]),
    ("<s>ab", [("<s>", "<s>"), (" ab", "ab")]),
    ("ab ab", [("<s>", ""), (" ab", "ab"), (" ab", " ab")]),
    ("ab<s>abc", [("<s>", ""), (" ab", "ab"), ("<s>", "<s>"), (" ab", "ab"), ("c", "c")]),
    ("ab<s> ab", [("<s>", ""), (" ab", "ab"), ("<s>", "<s>"), (" ", ""), (" ab", " ab")]),
    ("ab<s>", [("<s>", ""), (" ab", "ab"), ("<s>", "<s>")]),
    ("é", [("<s>", ""), (" ", ""), ("bytes:\\xc3", ""), ("bytes:\\xa9", "é")]),
    ("a€ b", [("<s>", ""), (" a", "a"), *((f"bytes:\\x{b:02x}", "€" * (b == 0xAC)) for b in "€".encode()), (" ", " "),
              ("b", "b")]),
    ([BOS, IDS["▁ab"], IDS["lo"]], [("<s>", ""), (" ab", "ab"), ("lo", "lo")]),
    ([BOS, IDS["▁"], IDS["▁ab"]], [("<s>", ""), (" ", ""), (" ab", " ab")]),
    ([BOS, IDS["▁"], BOS, IDS["▁ab"]], [("<s>", ""), (" ", ""), ("<s>", ""), (" ab", " ab")]),
    ([IDS["ab"], BOS, IDS["▁ab"]], [("ab", "ab"), ("<s>", ""), (" ab", " ab")]),
    ([BOS, IDS["▁▁"], IDS["a"]], [("<s>", ""), ("  ", " "), ("a", "a")]),
    ([BOS, IDS["▁a"], BYTE + 0xC3], [("<s>", ""), (" a", "a"), ("bytes:\\xc3", "\ufffd")]),
]  # fmt: skip


def test_offsets_of_an_echoed_sentencepiece_prompt_do_not_count_the_space_that_nobody_wrote(
    sentencepiece_path: Path,
) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for prompt, expected in SENTENCEPIECE_PROMPTS:
            for stream in (False, True):
                [choice] = await choices_of(http, prompt, stream=stream, echo=True, max_tokens=6)
                found = spans_of(choice)
                assert found[: len(expected)] == expected, (prompt, stream)
                check_answer(choice, len(expected))
                assert len(found) == len(expected) + 6

    talk_to(sentencepiece_path, talk)


def test_offsets_of_several_prompts_and_choices_each_index_their_own_text(sentencepiece_path: Path) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        prompts = [(prompt, spans) for prompt, spans in SENTENCEPIECE_PROMPTS if isinstance(prompt, str)]
        texts = [prompt for prompt, _ in prompts]
        for stream in (False, True):
            choices = await choices_of(http, texts, stream=stream, echo=True, n=2, max_tokens=4)
            assert len(choices) == 2 * len(prompts)
            for index, choice in enumerate(choices):
                expected = prompts[index // 2][1]
                assert spans_of(choice)[: len(expected)] == expected
                check_answer(choice, len(expected))

    talk_to(sentencepiece_path, talk)


def test_without_echo_the_first_token_stands_at_the_start_with_its_space(sentencepiece_path: Path) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        only = {"allowed_token_ids": [IDS["▁ab"], IDS["lo"]]}
        for stream in (False, True):
            for prompt in ("ab", [BOS, IDS["▁ab"]]):
                for choice in await choices_of(http, prompt, stream=stream, n=2, max_tokens=8, **only):
                    assert choice["logprobs"]["text_offset"][0] == 0
                    assert all(span == token for token, span in spans_of(choice))
                for choice in await choices_of(http, prompt, stream=stream, n=2, max_tokens=12):
                    check_answer(choice, 0)

    talk_to(sentencepiece_path, talk)


def test_a_prompt_that_is_too_long_is_not_echoed_before_it_is_refused(
    sentencepiece_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        monkeypatch.setattr(completions.CompletionAnswer, "_find_echoes", None)
        for prompt in ([BOS] * 129, ["ab", "ab " * 200], [[BOS], [BOS] * 10_000]):
            body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 1}
            error = error_of(await http.post(COMPLETIONS, json=body), 400)
            assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")

    talk_to(sentencepiece_path, talk)


def plain(metadata: dict[str, Any]) -> dict[str, Any]:
    """What a reader makes of the metadata."""

    def value_of(item: Any) -> Any:
        return item.value if isinstance(item, Typed) else item

    return {key: tuple(map(value_of, item)) if isinstance(item, list) else item for key, item in metadata.items()}


def tokenizer_of(metadata: dict[str, Any], user_defined: str) -> Tokenizer:
    kinds = [item.value for item in metadata["tokenizer.ggml.token_type"]]
    kinds[IDS[user_defined]] = 4
    return Tokenizer.from_gguf(plain(metadata | {"tokenizer.ggml.token_type": kinds}))


SENTENCEPIECE = tokenizer_of(sentencepiece_metadata(288), user_defined="lo")


def offsets_by_definition(tokenizer: Tokenizer, text: str, special: str = "<s>|lo") -> list[int]:
    """Each piece between special tokens stands in the tokens with a space before it, which is not in the text."""
    prefix = " " if tokenizer.adds_space_prefix else ""
    offsets, base = [0] if tokenizer.add_bos else [], 0
    for number, piece in enumerate(re.split(f"({special})", text)):
        if number % 2:
            offsets.append(base + len(piece) - len(piece.lstrip()))
        else:
            num_bytes = 0
            for token_id in tokenizer.encode(piece, add_bos=False) if piece else ():
                whole = (prefix + piece).encode()[:num_bytes].decode("utf-8", "ignore")
                offsets.append(base + max(0, len(whole) - len(prefix)))
                num_bytes += len(tokenizer.token_bytes(token_id))
        base += len(piece)
    return offsets


@given(st.lists(st.sampled_from(["<s>", "lo", " ", "  ", "a", "ab l", " é", "b ", "€"]), max_size=8))
def test_offsets_of_any_sentencepiece_text_are_those_of_its_definition(parts: list[str]) -> None:
    text = "".join(["c", *parts])  # a typed BOS at the head is a case of its own
    ids = SENTENCEPIECE.encode(text, parse_special=True)
    assert finish(prompt_offsets(SENTENCEPIECE, ids, text, typed=True)) == offsets_by_definition(SENTENCEPIECE, text)


def swallowing(tokenizer: Tokenizer, name: str, token_id: int) -> Tokenizer:
    """As some folders have it: a control token that takes the white space on both of its sides."""
    tokenizer.special_tokens = SpecialTokenMatcher([SpecialToken(name, token_id, lstrip=True, rstrip=True)])
    return tokenizer


SWALLOWING = swallowing(tokenizer_of(sentencepiece_metadata(288), user_defined="lo"), "<s>", BOS)
SWALLOWING_BYTES = swallowing(Tokenizer.from_gguf(plain(tokenizer_metadata(288))), "<|im_end|>", 2)


@given(st.lists(st.sampled_from(["<s>", " ", "  ", "\n", "a", "ab c", " é", "b ", "€", "\u3000"]), max_size=8))
@example(["<s>", " ", "\u3000", "a"])
@example(["<s>", " ", "\n", "ab c"])
def test_white_space_that_a_special_token_took_belongs_to_no_token(parts: list[str]) -> None:
    text = "".join(["c", *parts])
    for tokenizer, name in ((SWALLOWING, "<s>"), (SWALLOWING_BYTES, "<|im_end|>")):
        written = text.replace("<s>", name)
        ids = tokenizer.encode(written, parse_special=True)
        expected = offsets_by_definition(tokenizer, written, rf"\s*{re.escape(name)}\s*")
        found = finish(prompt_offsets(tokenizer, ids, written, typed=True))
        assert len(found) == len(expected)
        for offset, right in zip(found, expected, strict=True):
            # a single space that was taken is also the one that SentencePiece adds: nothing tells them apart
            assert offset == right or (tokenizer is SWALLOWING and written[offset:right] == " ")


@given(st.lists(st.sampled_from([BOS, 0, BYTE + 0xC3, BYTE + 0xA9, *IDS.values()]), max_size=12))
def test_offsets_of_any_token_ids_are_the_characters_decoded_before_them(ids: list[int]) -> None:
    text = SENTENCEPIECE.decode(ids)
    offsets = finish(prompt_offsets(SENTENCEPIECE, ids, text, typed=False))
    for index, offset in enumerate(offsets):
        before = SENTENCEPIECE.decode(ids[:index])
        assert offset in (len(before), len(before) - 1), "a character cut by the end counts when it is whole"
        assert text[:offset] == before[:offset]


@pytest.mark.parametrize("prompt", ["the thé", " th", "a<|im_start|>b", [3 + 0xC3], [1, 259, 3 + ord("e")]])
def test_offsets_of_byte_level_tokens_are_their_bytes_in_the_text(byte_level_path: Path, prompt: Any) -> None:
    async def talk(http: httpx.AsyncClient, engine: AsyncEngine) -> None:
        for stream in (False, True):
            for choice in await choices_of(http, prompt, stream=stream, echo=True, n=2, max_tokens=8):
                for token, span in spans_of(choice):
                    if token == "<|im_start|>":
                        assert span.replace("\ufffd", "") == (
                            token if isinstance(prompt, str) and "<" in prompt else ""
                        )
                    elif token.isascii() and not token.startswith(("bytes:", "<")):
                        assert span.removeprefix("\ufffd") == token

    talk_to(byte_level_path, talk)
