"""``octavo chat``: history, commands, stopping; on an engine without a model."""

from __future__ import annotations

import io
import os
import signal
import threading
from dataclasses import replace
from typing import Any

import pytest

from octavo.cli import chat, console
from octavo.cli.chat import Conversation
from octavo.cli.offline import interruptible, stream
from octavo.core.errors import ConfigError, PromptTooLong
from octavo.core.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def talk(monkeypatch: pytest.MonkeyPatch, conversation: Conversation, typed: str) -> None:
    """Feed lines to the loop as a pipe would."""
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    chat._converse(conversation)


def test_each_question_carries_the_whole_conversation_so_far(fake_engine: Any) -> None:
    engine = fake_engine(lambda prompt: [len(prompt)] * 4)
    conversation = Conversation(engine, GREEDY, system="Be brief")
    assert "".join(conversation.ask("Hi")) == "24 24 24 24 "
    assert "".join(conversation.ask("More")) != ""
    texts = ["".join(map(chr, request.prompt_token_ids)) for request in engine.seen]
    assert texts == [
        "<system>Be brief<user>Hi",
        "<system>Be brief<user>Hi<assistant>24 24 24 24 <user>More",
    ]


def test_reset_forgets_all_but_the_system_message(fake_engine: Any) -> None:
    conversation = Conversation(fake_engine(lambda prompt: [1]), GREEDY, system="Be brief")
    list(conversation.ask("Hi"))
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief"}]


def test_a_stopped_answer_stays_in_the_conversation_and_leaves_nothing_running(fake_engine: Any) -> None:
    engine = fake_engine(lambda prompt: range(100))
    conversation = Conversation(engine, SamplingParams(max_tokens=100))
    stop = threading.Event()
    pieces = []
    for piece in conversation.ask("Count", stop):
        pieces.append(piece)
        if len(pieces) == 3:
            stop.set()
    assert "".join(pieces) == "0 1 2 "
    assert conversation.messages[-1] == {"role": "assistant", "content": "0 1 2 "}
    assert conversation.last_answer is not None
    assert conversation.last_answer.finish_reason == "abort"
    assert not engine.has_unfinished


def test_a_question_too_long_for_the_context_leaves_the_conversation_as_it_was(fake_engine: Any) -> None:
    conversation = Conversation(fake_engine(lambda prompt: [1] * 4, max_model_len=40), GREEDY)
    list(conversation.ask("Hi"))
    before = list(conversation.messages)
    with pytest.raises(PromptTooLong):
        list(conversation.ask("x" * 100))
    assert conversation.messages == before


def test_a_model_without_a_chat_template_is_refused_with_a_way_out(fake_engine: Any) -> None:
    engine = fake_engine(lambda prompt: [1])
    engine.chat_template, engine.config = None, replace(engine.config, chat_template="missing")
    with pytest.raises(ConfigError, match="its chat template is missing; use 'octavo complete'"):
        Conversation(engine, GREEDY)


def test_input_from_a_pipe_gives_the_answers_alone_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_engine: Any
) -> None:
    conversation = Conversation(fake_engine(lambda prompt: [7, 8]), GREEDY)
    talk(monkeypatch, conversation, "Hi\n\n/stats\n/nonsense\n/usr/bin?\n/reset\n/help\n/exit\nnever asked\n")
    out, err = capsys.readouterr()
    assert out == "7 8 \n7 8 \n"  # "Hi" and "/usr/bin?", which is no command
    assert "prompt 8 tokens (3 cached), answer 2 tokens (length), first token after 250 ms, then 50.0 tokens/s" in err
    assert "/nonsense is not a command" in err
    assert "the conversation starts anew" in err
    assert chat.HELP in err
    assert conversation.messages == []


def test_the_loop_goes_on_after_a_question_that_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_engine: Any
) -> None:
    conversation = Conversation(fake_engine(lambda prompt: [7], max_model_len=20), GREEDY)
    talk(monkeypatch, conversation, f"{'x' * 50}\nHi\n")
    out, err = capsys.readouterr()
    assert out == "7 \n"
    assert "/reset starts anew" in err


def test_the_first_ctrl_c_stops_between_steps_and_the_second_raises() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(1)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_leaving_a_stream_early_aborts_its_request(fake_engine: Any) -> None:
    engine = fake_engine(lambda prompt: range(100))
    outputs = stream(engine, [1], SamplingParams(max_tokens=50))
    next(outputs)
    assert engine.has_unfinished
    outputs.close()
    assert not engine.has_unfinished


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2Jb\x07c\x9bd\re\tf\ng"
    console.write_text(hostile)
    assert capsys.readouterr().out == hostile  # a pipe gets what the model wrote
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    console.write_text(hostile)
    assert capsys.readouterr().out == "a[2Jbcde\tf\ng"
