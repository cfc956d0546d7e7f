"""Warnings that clients can cause at will are logged seldom, and counted."""

from __future__ import annotations

import logging
import sys

import pytest

from octavo.api.log_filter import MAX_KINDS, SeldomFilter, seldom


def record(message: str, *args: object, at_s: float = 0.0, level: int = logging.WARNING) -> logging.LogRecord:
    made = logging.LogRecord("x", level, __file__, 1, message, args, None)
    made.created = 1e9 + at_s
    return made


def test_a_kind_of_warning_passes_once_in_so_many_seconds_and_says_how_many_did_not() -> None:
    kinds = SeldomFilter(every_s=10.0)
    assert kinds.filter(record("%d are open", 5))
    assert not any(kinds.filter(record("%d are open", n, at_s=n / 10)) for n in range(99))
    assert kinds.filter(record("another", at_s=9.8))
    later = record("%d are open", 7, at_s=10.0)
    assert kinds.filter(later)
    assert later.getMessage() == "7 are open (99 more like this since the last)"


def test_infos_pass_and_exceptions_are_told_apart_by_their_type() -> None:
    kinds = SeldomFilter()
    assert all(kinds.filter(record("hello", level=logging.INFO)) for _ in range(5))
    passed = []
    for error in (ValueError("a"), ValueError("b"), KeyError("c")):
        made = record("failed")
        try:
            raise error
        except (ValueError, KeyError):
            made.exc_info = sys.exc_info()
        passed.append(kinds.filter(made))
    assert passed == [True, False, True]


def test_what_is_remembered_is_bounded() -> None:
    kinds = SeldomFilter()
    for number in range(10 * MAX_KINDS):
        kinds.filter(record(f"request {number} is odd"))
    assert len(kinds._last) <= MAX_KINDS + 1


def test_the_filter_ends_with_its_context(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("octavo.api.connections")
    with seldom(logger.name):
        for _ in range(5):
            logger.warning("full")
    assert caplog.text.count("full") == 1
    logger.warning("full")
    assert caplog.text.count("full") == 2
