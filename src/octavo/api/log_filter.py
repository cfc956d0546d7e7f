"""A log that no client can fill."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

#: A warning or an error of one kind is logged once in so many seconds, with the number of those that were not.
EVERY_S = 10.0
#: Kinds that are remembered.
MAX_KINDS = 256


class SeldomFilter(logging.Filter):
    """Lets each kind of warning through once per ``every_s``. Kind: unformatted message and type of the exception."""

    def __init__(self, every_s: float = EVERY_S) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[object, tuple[float, int]] = {}  # when it was let through, how many were not since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is logged."""
        if record.levelno < logging.WARNING:
            return True
        if len(self._last) > MAX_KINDS:
            self._last.clear()
        kind = (record.msg, record.exc_info[0] if record.exc_info else None)
        last, num_left_out = self._last.get(kind, (-self._every_s, 0))
        if record.created - last < self._every_s:
            self._last[kind] = last, num_left_out + 1
            return False
        self._last[kind] = record.created, 0
        if num_left_out:
            record.msg, record.args = f"{record.getMessage()} ({num_left_out} more like this since the last)", ()
        return True


@contextmanager
def seldom(*names: str) -> Iterator[None]:
    """Within this context, warnings of these loggers are rare."""
    kinds = SeldomFilter()
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(kinds)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(kinds)
