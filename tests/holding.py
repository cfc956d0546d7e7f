"""How long work holds what others wait for: CPU time between two yields, and between two chances to give the GIL away.

All in ``time.thread_time``, so that a busy machine changes nothing. Python hands the GIL over between bytecodes, so one
call into C is what holds it: ``Holds`` measures the CPU time between two events of the interpreter (a line, a call, a
return, of Python or of C) on every thread that is started while it watches, and on its own.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Generator
from types import FrameType
from typing import Any, Self

#: Calls into C that let the GIL go while they work or wait.
FREE = frozenset({"encode_batch_fast", "acquire", "wait", "select", "poll", "sleep", "join", "read", "recv", "send"})


def steps_of(steps: Generator[None, None, Any]) -> tuple[Any, list[float]]:
    """Result of ``steps``, or the exception that they raised, and the CPU seconds of each step."""
    seconds: list[float] = []
    while True:
        start = time.thread_time()
        try:
            next(steps)
        except StopIteration as end:
            return end.value, seconds
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            return error, seconds
        finally:
            seconds.append(time.thread_time() - start)


def longest_hold(work: Callable[[], object], *, tries: int = 3) -> tuple[float, str]:
    """Seconds that ``work`` holds the GIL for at most, and where: the least of several tries, which do the same."""
    found: list[tuple[float, str]] = []
    for _ in range(tries):
        with Holds() as holds:
            work()
        found.append((holds.longest_s, holds.where))
        if holds.longest_s < 0.001:
            break
    return min(found)


class Holds:
    """A context that knows the longest hold of the GIL within it: ``longest_s``, ``where``.

    The garbage collector does not look through what was there before.
    """

    def __init__(self, free: frozenset[str] = FREE) -> None:
        self._free = free
        self._last = threading.local()
        self.longest_s = 0.0
        self.where = ""

    def __enter__(self) -> Self:
        gc.collect()
        gc.freeze()
        self._old = sys.gettrace(), sys.getprofile()
        threading.settrace(self._trace)
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        sys.settrace(self._trace)
        self._last.at = time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._old[0])
        sys.setprofile(self._old[1])
        threading.settrace(None)  # type: ignore[arg-type]
        threading.setprofile(None)
        gc.unfreeze()

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._note(frame, counts=True)
        return self._trace

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        is_free = event in ("c_return", "c_exception") and getattr(arg, "__name__", "") in self._free
        self._note(frame, counts=not is_free, called=getattr(arg, "__name__", "") if event.startswith("c_") else "")

    def _note(self, frame: FrameType, *, counts: bool, called: str = "") -> None:
        now = time.thread_time()
        spent = now - getattr(self._last, "at", now)
        if counts and spent > self.longest_s:
            self.longest_s = spent
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {called}"
        self._last.at = time.thread_time()
