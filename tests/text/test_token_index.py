from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from holding import steps_of
from octavo.text.token_index import TokenIndex


def index_of(texts: list[bytes], control: set[int]) -> TokenIndex:
    table = SimpleNamespace(
        vocab_size=len(texts), token_bytes=texts.__getitem__, is_control=lambda token_id: token_id in control
    )
    index, _ = steps_of(TokenIndex.build(table))  # type: ignore[arg-type]
    assert isinstance(index, TokenIndex)
    return index


@given(
    texts=st.lists(st.binary(max_size=4) | st.text("ab ", max_size=4).map(str.encode), min_size=1, max_size=20),
    wanted=st.binary(min_size=1, max_size=3) | st.text("ab ", min_size=1, max_size=3).map(str.encode),
    control=st.sets(st.integers(0, 20)),
)
def test_the_tokens_that_contain_a_text_are_found(texts: list[bytes], wanted: bytes, control: set[int]) -> None:
    expected = [i for i, text in enumerate(texts) if wanted in text and i not in control]
    assert index_of(texts, control).containing(wanted).tolist() == expected
