"""Words and bytes counted in Arrow's buffers equal those counted by Python."""

from __future__ import annotations

import sys

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.tokens.encoding import LONG_SPACES, buffers_of, count_words

SPACES = [chr(sign) for sign in range(sys.maxunicode + 1) if chr(sign).isspace()]
NEAR_SPACES = list("\x00\x08\x0e\x1b\x7f\x80\xa1\u180e\u200b\u2010\u2027\u2060\u3001\ufeff")
TEXTS = st.text(
    st.sampled_from([*SPACES, *NEAR_SPACES, "a", "é", "가", "漢", "👍"]) | st.characters(exclude_categories=["Cs"]),
    max_size=12,
)


def test_white_space_equals_that_of_python() -> None:
    assert sorted(LONG_SPACES) == sorted(sign.encode() for sign in SPACES if ord(sign) > 127)


@settings(max_examples=120, deadline=None)
@given(st.lists(TEXTS, max_size=6), st.lists(TEXTS, max_size=2))
def test_words_and_bytes(texts: list[str], before: list[str]) -> None:
    column = pa.array([*before, *texts, "after"], pa.string()).slice(len(before), len(texts))
    octets, bounds = buffers_of(column)
    assert count_words(octets, bounds) == sum(len(text.split()) for text in texts)
    assert octets.tobytes() == "".join(texts).encode()
