from __future__ import annotations

import codecs

from hypothesis import example, given
from hypothesis import strategies as st

from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import SampledToken, TokenEvent
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams
from octavo.engine.output_processor import OutputProcessor

EOS = 0


class ByteTokenizer:
    """Vocabulary: EOS, all single bytes, and some longer pieces that end inside characters."""

    pieces = (b"", *(bytes([b]) for b in range(256)), "é".encode() + b"\xe2", b"\x82\xac!", b"stop", b"st", b"op now")
    vocab_size = len(pieces)
    bytes_by_id = visible_bytes_by_id = pieces
    adds_space_prefix = False


TOKENIZER = ByteTokenizer()


def started(**sampling: object) -> OutputProcessor:
    """One that knows the request "r"."""
    request = Request(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(**sampling), max_tokens=1000,  # type: ignore[arg-type]
        stop_token_ids=frozenset({EOS}), seed=0, arrival_s=0.0,
    )  # fmt: skip
    processor = OutputProcessor(TOKENIZER)  # type: ignore[arg-type]
    processor.add(request)
    return processor


def run(ids: list[int], finish: str | None, **sampling: object) -> tuple[list[RequestOutput], str | None]:
    """Feed tokens as the engine would: stop at a stop string's hit."""
    processor = started(logprobs=0, **sampling)
    outputs: list[RequestOutput] = []
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        event = TokenEvent(
            request_id="r",
            token=SampledToken(token_id=token, logprob=-float(index)),
            finish_reason=finish if last else None,  # type: ignore[arg-type]
        )
        new, hits = processor.process([event])
        outputs += new
        if hits:
            return outputs, hits[0].stop
        if new and new[-1].finish_reason:
            break
    return outputs, None


FREQUENT = [1 + byte for byte in "€st".encode()] + list(range(257, TOKENIZER.vocab_size))
tokens_of_text = st.one_of(st.sampled_from(FREQUENT), st.integers(1, TOKENIZER.vocab_size - 1))
texts = st.lists(tokens_of_text, max_size=30)
stops = st.lists(st.sampled_from(["stop", "op", "€", "é", "tst", "\ufffd", "x"]), max_size=3, unique=True).map(tuple)


def num_drawn(ids: list[int], stop: tuple[str, ...]) -> int:
    """Tokens up to the first with which a stop string is complete."""
    decoder, known = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for count, token in enumerate(ids, 1):
        known += decoder.decode(TOKENIZER.pieces[token], count == len(ids))
        if any(s in known for s in stop):
            return count
    return len(ids)


@given(ids=texts, stop=stops, include=st.booleans())
@example(ids=[1 + ord("a"), 1 + 0xE2], stop=("\ufffd",), include=True)  # what ends unfinished completes it
@example(ids=[1 + ord("a"), 1 + 0xE2], stop=("\ufffd",), include=False)
def test_text_and_tokens_are_cut_alike_at_the_first_stop_string_and_all_drawn_are_counted(
    ids: list[int], stop: tuple[str, ...], include: bool
) -> None:
    ids = ids or [1 + ord("z")]
    outputs, _ = run(ids, "length", stop=stop, include_stop_str_in_output=include)
    text = "".join(output.text for output in outputs)
    tokens = [token for output in outputs for token in output.token_ids]
    whole = b"".join(map(TOKENIZER.pieces.__getitem__, ids)).decode("utf-8", "replace")
    found = [(whole.find(s), -len(s), s) for s in stop if s in whole]
    last = outputs[-1]
    assert last.usage is not None
    assert tokens == ids[: len(tokens)]
    assert [t.token_id for output in outputs for t in output.logprobs or ()] == tokens
    if not found:
        assert (text, tokens, last.finish_reason) == (whole, ids, "length")
        assert last.usage.completion_tokens == len(ids)
        return
    assert last.usage.completion_tokens == num_drawn(ids, stop), "all up to the one that completed the stop string"
    assert last.finish_reason == "stop"
    assert last.stop_reason in stop
    at = whole.find(str(last.stop_reason))
    assert text == whole[: at + len(str(last.stop_reason)) * include]
    decoder, num_chars, starts = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for token in ids:
        starts.append(num_chars)
        num_chars += len(decoder.decode(TOKENIZER.pieces[token]))
    assert len(tokens) == sum(start < len(text) for start in starts), "all that begin before the cut, and no other"


@given(ids=texts, stop=stops, logprobs=st.booleans(), min_tokens=st.integers(0, 4))
def test_after_each_token_all_is_out_but_what_may_begin_a_stop_string_and_tokens_that_hold_some_of_that(
    ids: list[int], stop: tuple[str, ...], logprobs: bool, min_tokens: int
) -> None:
    processor = started(logprobs=0 if logprobs else None, stop=stop, min_tokens=min_tokens)
    decoder, known, unwatched, ends = codecs.getincrementaldecoder("utf-8")("replace"), "", 0, list[int]()
    text, tokens = "", list[int]()
    for count, token in enumerate(ids, 1):
        known += decoder.decode(TOKENIZER.pieces[token])
        if count < min_tokens:
            unwatched = len(known)
        if any(s in known[unwatched:] for s in stop):
            return
        outputs, _ = processor.process([TokenEvent("r", token=SampledToken(token_id=token))])
        for output in outputs:
            text += output.text
            tokens += output.token_ids
            assert [t.token_id for t in output.logprobs or ()] == (list(output.token_ids) if logprobs else [])
        watched = known[unwatched:]
        held = max((size for s in stop for size in range(len(s)) if watched.endswith(s[:size])), default=0)
        ends.append(len(known) + bool(decoder.getstate()[0]))  # a character begun is not out
        assert text == known[: len(known) - held]
        assert tokens == ids[: sum(end <= len(text) for end in ends)]


@given(ids=texts)
def test_no_character_is_ever_broken_or_doubled(ids: list[int]) -> None:
    outputs, _ = run([*ids, EOS], "stop")
    text = "".join(output.text for output in outputs)
    assert text == b"".join(map(TOKENIZER.pieces.__getitem__, ids)).decode("utf-8", "replace")
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == len(ids) + 1, "the stop token counts and has no text"


def test_a_stop_string_ends_the_request_before_the_next_token() -> None:
    s, t, o, p = (1 + ord(c) for c in "stop")
    outputs, hit = run([1 + ord("a"), s, t, o, p, 1 + ord("b")], None, stop=("stop",))
    assert hit == "stop"
    assert "".join(output.text for output in outputs) == "a"
    assert [token for output in outputs for token in output.token_ids] == [1 + ord("a")]


def test_stop_strings_count_only_from_min_tokens_on() -> None:
    x, y = 1 + ord("x"), 1 + ord("y")
    outputs, hit = run([x, x, y, x, y], None, stop=("x",), min_tokens=4)
    assert hit == "x"
    assert "".join(output.text for output in outputs) == "xxy"


def test_tokens_held_back_for_a_stop_that_does_not_come_are_released() -> None:
    s, t = 1 + ord("s"), 1 + ord("t")
    outputs, _ = run([s, t], "length", stop=("stop",))
    assert "".join(output.text for output in outputs) == "st"
    assert outputs[-1].usage is not None
    assert outputs[-1].usage.completion_tokens == 2


def test_an_unknown_request_is_ignored() -> None:
    processor = OutputProcessor(TOKENIZER)  # type: ignore[arg-type]
    assert processor.process([TokenEvent(request_id="gone", finish_reason="abort")]) == ([], [])
    both = [TokenEvent("gone", token=SampledToken(token_id=98)), TokenEvent("r", token=SampledToken(token_id=98))]
    (output,), endings = started().process(both)
    assert (output.request_id, output.text, endings) == ("r", "a", [])


def test_all_that_had_news_fail_with_a_step_whose_text_could_not_be_made() -> None:
    processor = started()
    processor.process([TokenEvent("r", token=SampledToken(token_id=98))])
    events = [TokenEvent("gone", token=SampledToken(token_id=98)), TokenEvent("r", token=SampledToken(token_id=98))]
    (output,), (ending,) = processor.fail(events, "why")
    assert (output.request_id, output.finish_reason, output.stop_reason) == ("r", "error", "why")
    assert output.usage == Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    assert (ending.event, ending.reason, ending.stop) == (events[1], "error", "why")
    assert processor.process(events) == ([], []), "it is forgotten"


def test_choices_share_their_stop_strings_which_go_with_the_last_of_them() -> None:
    params = SamplingParams(stop=tuple("a" * 1023 + chr(ord("a") + index) for index in range(16)))
    processor = OutputProcessor(TOKENIZER)  # type: ignore[arg-type]
    for index in range(512):
        processor.add(
            Request(
                request_id=f"r{index}", prompt_token_ids=(1,), sampling=params, max_tokens=1, seed=0, arrival_s=0.0,
                stop_token_ids=frozenset({EOS}),
            )
        )  # fmt: skip
    (strings,) = processor._stops.values()
    assert sum(len(borders) for borders in strings.borders) == 16  # nothing worked out yet
    del strings
    token = SampledToken(token_id=1 + ord("a"), logprob=-1.0)
    processor.process(TokenEvent(request_id=f"r{i}", token=token, finish_reason="length") for i in range(512))
    assert not processor._stops


def test_prompt_logprobs_are_told_once_with_the_first_token_or_with_the_end() -> None:
    of_prompt = tuple(SampledToken(token_id=i, logprob=-1.0) for i in range(3))
    for finish, num_early in ((None, 1), ("length", 1), (None, 0), ("length", 0)):
        request = Request(
            request_id="r", prompt_token_ids=(1, 2), sampling=SamplingParams(prompt_logprobs=0), max_tokens=9,
            stop_token_ids=frozenset({EOS}), seed=0, arrival_s=0.0,
        )  # fmt: skip
        processor = OutputProcessor(TOKENIZER)  # type: ignore[arg-type]
        processor.add(request)
        if num_early:  # a chunk that draws nothing
            first, _ = processor.process([TokenEvent("r", prompt_logprobs=of_prompt[:num_early])])
            assert first == []
        (output,), _ = processor.process(
            [
                TokenEvent(
                    "r", token=SampledToken(token_id=98), prompt_logprobs=of_prompt[num_early:], finish_reason=finish
                )
            ]  # type: ignore[arg-type]
        )
        assert output.prompt_logprobs == of_prompt
        assert (output.text, output.token_ids) == ("a", (98,))
        if finish is None:
            ((later,), _) = processor.process([TokenEvent("r", token=SampledToken(token_id=99))])
            assert later.prompt_logprobs is None
