"""The rules of bench/minimal_pairs.py, and what counts of tokens choose."""

from __future__ import annotations

import numpy as np
import pytest

from bench.minimal_pairs import RULES, accuracy_of_counts, build_pairs
from textmill.evaluation.tasks.perplexity import Counts

TEXT = """\
The mills of the town were closed in winter.
He gave it to an old miller near the river.
Bread comes slowly from stone.
The first is old and the second is new again.
In 1847 there was a fire at the mill.
Too few words are here"""


def test_each_rule_changes_one_thing() -> None:
    pairs = build_pairs([TEXT], 5)
    assert pairs["agreement"] == [
        ("The mills of the town were closed in winter.", "The mills of the town was closed in winter.")
    ]
    assert pairs["article"] == [
        ("He gave it to an old miller near the river.", "He gave it to a old miller near the river.")
    ]
    assert len(pairs["order"]) == 2, "two forms, and none, leave a change of order"
    for good, bad in pairs["order"]:
        words = good.split(), bad.split()
        changed = [number for number, (one, other) in enumerate(zip(*words, strict=True)) if one != other]
        assert sorted(words[0]) == sorted(words[1])
        assert changed == [changed[0], changed[0] + 1]
    twice = build_pairs([TEXT, TEXT.replace("mills", "gates")], 8)
    assert len(twice["agreement"]) == 1, "one of eight forms"
    assert not build_pairs(["It is 5 o'clock in the (old) town."], 5)["agreement"], "numbers and brackets"


def test_counts_choose_the_frequent_tokens() -> None:
    """Tokens 0, 1, 2 were seen 8, 2 and 0 times, 1 mostly before 0."""
    counts = Counts(3, 10, np.array([8, 2, 0]), np.array([0, 1, 3]), np.array([6, 1, 2]))
    pairs = [("0 0 0", "0 1 0"), ("1 0", "0 1"), ("2", "0")]
    found = accuracy_of_counts(counts, lambda text: [int(word) for word in text.split()], pairs, 0)
    assert found["unigram"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert set(RULES) == {"agreement", "article", "order"}
