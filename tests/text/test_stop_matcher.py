"""Stop strings against a definition that looks at the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.stop_matcher import StopMatcher, StopStrings

LETTERS = "abé"
stop_sets = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4).map(tuple)
pieces = st.lists(st.text(LETTERS, max_size=6), max_size=12)


def first_complete(text: str, stops: tuple[str, ...]) -> tuple[int, int] | None:
    """[start, end) of the stop that is complete first; of those that end together the longest."""
    found = [(end, end - len(stop)) for end in range(1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if not found:
        return None
    end, start = min(found)
    return start, end


def longest_open_suffix(text: str, stops: tuple[str, ...]) -> int:
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


@given(stops=stop_sets, texts=pieces, include=st.booleans())
def test_however_the_text_is_cut_the_same_is_released_and_the_same_stop_found(
    stops: tuple[str, ...], texts: list[str], include: bool
) -> None:
    matcher = StopMatcher(StopStrings(stops), include_stop=include)
    released, matched = "", None
    for text in texts:
        new, matched = matcher.push(text)
        released += new
        assert matcher.num_released == len(released)
        if matched is not None:
            break
    whole = "".join(texts)
    expected = first_complete(whole, stops)
    if expected is None:
        assert matched is None
        assert released + matcher.flush() == whole
    else:
        start, end = expected
        assert matched == whole[start:end]
        assert released == whole[: end if include else start]
        assert matcher.flush() == ""


@given(stops=stop_sets, texts=pieces)
def test_text_is_held_back_exactly_as_long_as_a_stop_may_still_match(stops: tuple[str, ...], texts: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    seen = released = ""
    for text in texts:
        new, matched = matcher.push(text)
        if matched is not None:
            return
        seen, released = seen + text, released + new
        assert matcher.held == longest_open_suffix(seen, stops)
        assert released == seen[: len(seen) - matcher.held]


def test_a_stop_split_over_pieces_never_leaks() -> None:
    matcher = StopMatcher(StopStrings(("</end>",)))
    assert matcher.push("all</e") == ("all", None)
    assert matcher.held == 3
    assert matcher.push("nd> more") == ("", "</end>")
    assert matcher.push("even more") == ("", "</end>")


def test_a_false_start_is_released_as_soon_as_it_is_one() -> None:
    matcher = StopMatcher(StopStrings(("aab",)))
    assert matcher.push("aa") == ("", None)
    assert matcher.push("a") == ("a", None)
    assert matcher.push("b") == ("", "aab")


def test_a_stop_inside_a_longer_one_ends_the_text_without_waiting() -> None:
    matcher = StopMatcher(StopStrings(("\n\n", "\n")), include_stop=True)
    assert matcher.push("line\n") == ("line\n", "\n")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("a", ""))


def test_long_near_misses_cost_time_linear_in_the_text() -> None:
    num_borders = 0

    class Counting(StopStrings):
        def border(self, index: int, size: int) -> int:
            nonlocal num_borders
            num_borders += 1
            return super().border(index, size)

    stops = tuple("a" * size + "b" for size in range(1, 200, 12))
    matcher = StopMatcher(Counting(stops))
    text = "a" * 5000 + "c"
    assert matcher.push(text) == (text, None)
    assert num_borders <= 2 * len(text) * len(stops)


@given(stop=st.text(LETTERS, min_size=1, max_size=12), data=st.data())
def test_a_border_is_the_longest_prefix_that_is_also_a_suffix(stop: str, data: st.DataObject) -> None:
    strings = StopStrings((stop,))
    for size in data.draw(st.lists(st.integers(1, len(stop)), max_size=8)):
        head = stop[:size]
        assert strings.border(0, size) == max(k for k in range(size) if head.endswith(head[:k]))


def test_stop_strings_cost_nothing_before_text_comes_to_match_them() -> None:
    stops = tuple("a" * 1023 + chr(ord("a") + index) for index in range(16))
    strings = StopStrings(stops)
    assert sum(map(len, strings.borders)) == len(stops)
    matcher = StopMatcher(strings)
    assert matcher.push("xyz") == ("xyz", None)
    assert sum(map(len, strings.borders)) == len(stops)
    text = "b" + "a" * 1000 + "x"
    assert matcher.push(text) == (text, None)
    assert max(map(len, strings.borders)) <= 1001
