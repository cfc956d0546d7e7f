"""One request at a time on an engine in this process, stoppable between two steps."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from octavo.core.output import RequestOutput
from octavo.core.request import Submission
from octavo.core.sampling_params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.requests import make_requests

_ids = itertools.count()


def stream(
    engine: Engine, prompt_token_ids: Sequence[int], sampling: SamplingParams, stop: threading.Event | None = None
) -> Iterator[RequestOutput]:
    """What is new after each step, until the request ends. Setting ``stop`` ends it with reason "abort".

    Raises InvalidRequest or PromptTooLong, before anything runs, if the model cannot serve it.
    """
    [request] = make_requests(
        engine.config,
        Submission(request_id=f"cli-{next(_ids)}", prompt_token_ids=prompt_token_ids, sampling=sampling),
        arrival_s=time.monotonic(),
    )
    engine.submit([request])
    try:
        while engine.has_unfinished:
            yield from engine.step()
            if stop is not None and stop.is_set():
                yield from engine.abort(request.request_id)
    finally:
        engine.abort(request.request_id)  # does nothing if it has ended


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Within this, Ctrl-C sets the event instead of raising in the middle of a step; a second Ctrl-C raises.

    A process that ignores the signal (a shell's background job) goes on ignoring it.
    """
    stop = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        yield stop
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
