"""Drives a loaded engine step by step, on the test's own thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.core.output import RequestOutput
from octavo.core.plan import SampledToken
from octavo.core.request import Request, Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.requests import make_requests


@dataclass(slots=True)
class Result:
    """One sequence's whole output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or ()
        self.outputs.append(output)

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]


class Offline:
    """A loaded engine and what its sequences have said so far."""

    _ids = itertools.count()

    def __init__(self, loaded: Engine) -> None:
        self.loaded = loaded
        self.results: dict[str, Result] = {}
        self._salts = itertools.count()

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, *, salt: bytes = b"", n: int = 1
    ) -> list[Request]:
        """Queue one call."""
        submission = Submission(
            request_id=f"e2e-{next(self._ids)}", prompt_token_ids=prompt, sampling=sampling, n=n, cache_salt=salt
        )
        requests = make_requests(self.loaded.config, submission, arrival_s=time.monotonic())
        self.results |= {request.request_id: Result() for request in requests}
        self.loaded.submit(requests)
        return requests

    def step(self) -> None:
        for output in self.loaded.step():
            self.results[output.request_id].add(output)

    def run(self) -> None:
        """Step until nothing is left, then check the bookkeeping."""
        while self.loaded.has_unfinished:
            self.step()
        manager = self.loaded.scheduler.manager
        manager.check_integrity()
        assert manager.stats().pinned_blocks == 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams] | SamplingParams, *,
        together: bool = True, salt: bytes | None = None, n: int = 1,
    ) -> list[Result]:  # fmt: skip
        """All sequences of all prompts, run together or one prompt after the other, in a prefix cache of their own."""
        salt = self.new_salt() if salt is None else salt
        params = sampling if isinstance(sampling, Sequence) else [sampling] * len(prompts)
        requests: list[Request] = []
        for prompt, one in zip(prompts, params, strict=True):
            requests += self.submit(prompt, one, salt=salt, n=n)
            if not together:
                self.run()
        self.run()
        return [self.results.pop(request.request_id) for request in requests]

    def new_salt(self) -> bytes:
        """A prefix cache that nobody has used yet."""
        return b"test-%d" % next(self._salts)

    def steps_since(self, step_id: int) -> list[tuple[str, int, int]]:
        """(request, start, length) of every chunk run after a step."""
        return [
            (chunk.request_id, chunk.start, chunk.length)
            for step in self.loaded.tracer.steps(since=step_id)
            for chunk in step.chunks
        ]

    @property
    def last_step(self) -> int:
        steps = self.loaded.tracer.steps(limit=1)
        return steps[-1].step_id if steps else -1
