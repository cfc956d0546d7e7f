"""``octavo chat``: talk to a model in the terminal."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.console import remark, write_text
from octavo.cli.flags import with_config
from octavo.cli.sampling import MaxTokens, MinP, Seed, Stop, Temperature, TopK, TopP, sampling_params
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequest, PromptTooLong
from octavo.core.output import RequestOutput
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

HELP = """\
/reset   forget the conversation
/stats   figures of the last answer
/help    this list
/exit    leave (or Ctrl-D)
Ctrl-C stops an answer; what was said so far stays in the conversation."""

_COMMAND = re.compile(r"/[a-z]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Figures of one answer."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_s: float | None  # from the question to the first token; None if there was none
    tokens_per_s: float | None  # after the first token; None with fewer than two
    finish_reason: str

    @classmethod
    def of(cls, last: RequestOutput) -> AnswerStats:
        """From the last output of a request."""
        assert last.usage is not None
        assert last.finish_reason is not None
        timings = last.timings
        return cls(
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
            completion_tokens=last.usage.completion_tokens,
            ttft_s=timings.ttft_s if timings else None,
            tokens_per_s=1 / timings.tpot_s if timings and timings.tpot_s else None,
            finish_reason=last.finish_reason,
        )

    def __str__(self) -> str:
        first = "no token" if self.ttft_s is None else f"first token after {self.ttft_s * 1000:.0f} ms"
        rate = "" if self.tokens_per_s is None else f", then {self.tokens_per_s:.1f} tokens/s"
        return (
            f"prompt {self.prompt_tokens} tokens ({self.cached_tokens} cached), answer {self.completion_tokens} tokens "
            f"({self.finish_reason}), {first}{rate}"
        )


class Conversation:
    """A history and the engine that continues it."""

    def __init__(self, engine: Engine, sampling: SamplingParams, system: str | None = None) -> None:
        """Raises ConfigError if the model has no chat template."""
        if engine.chat_template is None:
            raise ConfigError(
                f"{engine.config.model_name} cannot chat: its chat template is {engine.config.chat_template}; "
                "use 'octavo complete', or give --chat-template"
            )
        self._engine = engine
        self._template = engine.chat_template
        self._sampling = sampling
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)
        self.last_answer: AnswerStats | None = None

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)

    def ask(self, question: str, stop: threading.Event | None = None) -> Iterator[str]:
        """Pieces of the answer. It joins the history when it ends, also when ``stop`` ends it early.

        A question that cannot be asked (PromptTooLong, InvalidRequest) leaves the history as it was.
        """
        from octavo.cli.offline import stream

        asked = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        for output in stream(self._engine, self._template.encode(asked), self._sampling, stop):
            answer += output.text
            yield output.text
            if output.finish_reason is not None:
                self.last_answer = AnswerStats.of(output)
        self.messages = [*asked, {"role": "assistant", "content": answer}]


@with_config()
def chat(
    engine: EngineConfig,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Stop = None,
) -> None:
    """Chat with a model in the terminal, without a server. /help lists what can be typed."""
    sampling = sampling_params(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, stop=stop
    )
    from octavo.engine.load import load_engine

    loaded = load_engine(engine)
    try:
        config = loaded.config
        if sys.stdin.isatty():
            remark(
                f"{config.model_name} on {config.backend} ({config.device}, {config.dtype}), context "
                f"{config.max_model_len} tokens. /help lists the commands, Ctrl-D leaves."
            )
        _converse(Conversation(loaded, sampling, system))
    finally:
        loaded.close()


def _converse(conversation: Conversation) -> None:
    """The loop: a line in, a command or an answer out, until the input ends."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        enable_line_editing()
    while (line := _read_line(is_terminal)) is not None:
        text = line.strip()
        if not text:
            continue
        if _COMMAND.fullmatch(text):
            if text in ("/exit", "/quit", "/bye"):
                return
            _run_command(conversation, text)
        else:
            _answer(conversation, text)


def enable_line_editing() -> None:
    """Arrow keys and a history of this session's lines, where Python has readline."""
    try:
        import readline  # noqa: F401 - input() uses it once it is imported
    except ImportError:
        remark("(no line editing: this Python has no readline)")


def _read_line(is_terminal: bool) -> str | None:
    """The next line, or None at the end of the input. Ctrl-C drops what was typed."""
    if not is_terminal:
        return sys.stdin.readline() or None
    while True:
        try:
            return input("> ")
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            remark("\n(/exit or Ctrl-D leaves)")


def _run_command(conversation: Conversation, command: str) -> None:
    if command == "/reset":
        conversation.reset()
        remark("(the conversation starts anew)")
    elif command == "/stats":
        remark(f"({conversation.last_answer or 'no answer yet'})")
    elif command == "/help":
        remark(HELP)
    else:
        remark(f"({command} is not a command; /help lists them)")


def _answer(conversation: Conversation, question: str) -> None:
    from octavo.cli.offline import interruptible

    try:
        with interruptible() as stop:
            for piece in conversation.ask(question, stop):
                write_text(piece)
        write_text("\n")
        if stop.is_set():
            remark("(stopped)")
    except PromptTooLong as error:
        remark(f"({error}; /reset starts anew)")
    except InvalidRequest as error:
        remark(f"({error})")
