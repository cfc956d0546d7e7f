"""The offline front door: prompts in, results out, on the calling thread."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import EngineUnavailable, InvalidRequest
from octavo.core.output import RequestOutput, Timings, Usage
from octavo.core.plan import FinishReason, SampledToken
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.load import load_engine
from octavo.engine.requests import make_requests

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True, kw_only=True)
class Completion:
    """One finished choice of one prompt.

    ``finish_reason`` "error" means that this one failed, alone; ``stop_reason`` says why.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    def _extend(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.usage, self.timings = output.usage, output.timings


@dataclass(slots=True, kw_only=True)
class GenerateResult:
    """What came of one prompt: ``n`` completions."""

    prompt_token_ids: tuple[int, ...]
    completions: list[Completion]
    prompt_logprobs: tuple[SampledToken, ...] | None = None  # of positions 1, 2, ...

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text


class LLM:
    """A model in this process, without a server and without threads of its own.

    >>> llm = LLM()                                            # doctest: +SKIP
    >>> llm.chat([{"role": "user", "content": "Hi"}]).text     # doctest: +SKIP

    Takes an EngineConfig, or its fields as keywords. A context manager; ``close()`` releases the memory.
    """

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None, **fields: Any) -> None:
        if config is not None and (fields or model is not None):
            raise InvalidRequest("give either config= or its fields as keywords, not both")
        if model is not None:
            fields["model"] = model
        self._engine: Engine = load_engine(config or EngineConfig(**fields))
        self._ids = itertools.count()
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the model's memory. Nothing may be generated afterwards. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._engine.close()

    @property
    def engine(self) -> Engine:
        """The parts behind: config, tokenizer, core. Yours to look at between calls."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = False,
    ) -> list[GenerateResult]:
        """Complete each prompt (text or token ids); results come in the order of the prompts.

        sampling: one for all, or one per prompt. Any number of prompts: the scheduler keeps as many running as fit.
        Raises InvalidRequest before anything runs if one of them cannot be served.
        """
        many: list[Prompt] = [prompts] if _is_one_prompt(prompts) else list(prompts)  # type: ignore[list-item, arg-type]
        tokenizer = self._engine.tokenizer
        ids = [tokenizer.encode(p, parse_special=True) if isinstance(p, str) else p for p in many]
        return self._run(ids, sampling, n, progress)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        progress: bool = False,
    ) -> Any:
        """Answer one conversation (returns its GenerateResult) or several (returns a list of them)."""
        template = self._engine.require_chat_template()
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        many: Iterable[Messages] = [conversations] if one else conversations  # type: ignore[list-item, assignment]
        results = self._run([template.encode(messages) for messages in many], sampling, n, progress)
        return results[0] if one else results

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        n: int,
        progress: bool,
    ) -> list[GenerateResult]:
        if self._closed:
            raise EngineUnavailable("this LLM is closed; make another")
        params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(params) != len(prompts):
            raise InvalidRequest(f"{len(params)} sampling parameters were given for {len(prompts)} prompts")
        batches = [
            make_requests(
                self._engine.config,
                Submission(request_id=f"offline-{next(self._ids)}", prompt_token_ids=ids, sampling=one, n=n),
                arrival_s=time.monotonic(),
            )
            for ids, one in zip(prompts, params, strict=True)
        ]
        results = [
            GenerateResult(prompt_token_ids=batch[0].prompt_token_ids, completions=[Completion() for _ in batch])
            for batch in batches
        ]
        result_of = {r.request_id: result for batch, result in zip(batches, results, strict=True) for r in batch}
        for batch in batches:
            self._engine.submit(batch)
        try:
            self._collect(result_of, progress)
        finally:  # Ctrl-C leaves nothing running
            for request_id in result_of:
                self._engine.abort(request_id)
        return results

    def _collect(self, result_of: Mapping[str, GenerateResult], progress: bool) -> None:
        with _progress_bar(len(result_of), progress) as finished:
            while self._engine.has_unfinished:
                for output in self._engine.step():
                    result = result_of[output.request_id]
                    result.completions[output.choice_index]._extend(output)
                    if output.prompt_logprobs is not None:
                        result.prompt_logprobs = (*(result.prompt_logprobs or ()), *output.prompt_logprobs)
                    if output.finish_reason is not None:
                        finished()


def _is_one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


class _progress_bar:  # noqa: N801 - used like a function
    """A rich progress bar on standard error that counts sequences; nothing where that is no terminal."""

    def __init__(self, total: int, show: bool) -> None:
        self._bar = None
        if show and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(transient=True, console=Console(stderr=True))
            self._task = self._bar.add_task("generating", total=total)

    def __enter__(self) -> Any:
        if self._bar is None:
            return lambda: None
        self._bar.start()
        bar, task = self._bar, self._task
        return lambda: bar.advance(task)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
