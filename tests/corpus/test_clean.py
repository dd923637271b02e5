"""Cleaning rules: golden examples in several scripts, and that a second cleaning finds nothing to do."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.corpus.clean import RULES, clean

ALL = ["unicode", "newlines", "controls", "spaces"]
SIGNS = "\r\n\t \x00\x01\x85\u2028\ufeff\u0301eㅎㅏ\u1112\u1161\u3000"
NASTY = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(SIGNS)))


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("unicode", "\u1112\u1161\u11ab\u1100\u116e\u11a8\u110b\u1165", "한국어"),
        ("unicode", "I\u0307stanbul, g\u0306", "İstanbul, ğ"),
        ("unicode", "cafe\u0301 vie\u0323\u0302t", "café việt"),
        ("unicode", "\uf900 漢字", "豈 漢字"),
        ("unicode", "ﬁ ①", "ﬁ ①"),
        ("newlines", "a\r\nb\rc\u0085d\u2028e\u2029f\n", "a\nb\nc\nd\ne\nf\n"),
        ("newlines", "\r\r\n\n", "\n\n\n"),
        ("controls", "\ufeff값\x07\x1b[0m\tş\x7f\x9c\n", "값[0m\tş\n"),
        ("controls", "sol\x00sağ", "sol sağ"),
        ("spaces", "  bir  iki \t\n\n \n\n　三　\n\n", "bir  iki\n\n　三"),
        ("spaces", " \n\t ", ""),
    ],
)
def test_rule(rule: str, before: str, after: str) -> None:
    assert RULES[rule](before) == after


def test_together() -> None:
    assert clean("\ufeff한글\x00e\x01\u0301  \r\n\r\n\r\n\r\nson \r\n", ALL) == "한글 é\n\nson"


def test_no_rules_change_nothing() -> None:
    text = " a\r\n\x00\ufeff "
    assert clean(text, []) == text


def test_the_order_of_names_does_not_matter() -> None:
    assert clean("e\x01\u0301 \u2028 \r", ALL) == clean("e\x01\u0301 \u2028 \r", ALL[::-1]) == "é"


@given(NASTY, st.sets(st.sampled_from(ALL)))
def test_idempotent(text: str, rules: set[str]) -> None:
    once = clean(text, rules)
    assert clean(once, rules) == once


@given(NASTY)
def test_what_is_left(text: str) -> None:
    cleaned = clean(text, ALL)
    assert unicodedata.is_normalized("NFC", cleaned)
    assert not any(unicodedata.category(letter) == "Cc" and letter not in "\n\t" for letter in cleaned)
    assert "\n\n\n" not in cleaned
    assert cleaned == cleaned.strip()


def test_long_white_space_takes_no_time() -> None:
    assert clean("a" + " " * 2_000_000 + "b" + "\n" * 2_000_000 + "c", ALL) == "a" + " " * 2_000_000 + "b\n\nc"
