"""The paired test of two models equals an exact test of the items on which they differ."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from scipy.stats import binomtest, t, ttest_ind

from textmill.errors import TextmillError
from textmill.evaluation.metrics import t_p_value, t_quantile
from textmill.evaluation.paired import compare_groups, compare_items


def write(path: Path, values: list[float]) -> Path:
    rows = [{"task": "quiz", "id": f"quiz.jsonl:{number}", "acc": value} for number, value in enumerate(values, 1)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_p_value_is_that_of_mcnemars_exact_test(tmp_path: Path) -> None:
    """With answers that are right or wrong, flipping signs is tossing a coin for each item that differs."""
    dice = random.Random(2)
    first = [float(dice.random() < 0.5) for _ in range(300)]
    second = [1.0 if value == 0 and dice.random() < 0.25 else value * (dice.random() < 0.9) for value in first]
    found = compare_items(write(tmp_path / "a.jsonl", first), write(tmp_path / "b.jsonl", second), "acc")
    better = sum(b > a for a, b in zip(first, second, strict=True))
    worse = sum(b < a for a, b in zip(first, second, strict=True))
    exact = binomtest(better, better + worse).pvalue
    assert (found.only_second, found.only_first, found.items) == (better, worse, 300)
    # 10,000 flips: a standard error of at most 0.005
    assert found.p_value == pytest.approx(exact, abs=0.02)
    assert found.difference == pytest.approx((better - worse) / 300)
    assert found.interval[0] < found.difference < found.interval[1]


def test_only_common_items_count(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", [1.0, 0.5, 0.0])
    found = compare_items(first, write(tmp_path / "b.jsonl", [1.0, 0.5]), "acc")
    assert (found.items, found.difference, found.p_value) == (2, 0.0, 1.0)
    with pytest.raises(TextmillError, match="0 items with 'loss' in common"):
        compare_items(first, first, "loss")


@pytest.mark.parametrize("freedom", [1, 1.3, 2, 4, 30, 101, 1e6])
def test_students_t(freedom: float) -> None:
    for value in (0.0, 0.1, 1.0, 2.5, 12.0, 300.0):
        assert t_p_value(value, freedom) == pytest.approx(2 * t.sf(value, freedom), abs=1e-8)
    assert t_quantile(freedom) == pytest.approx(t.ppf(0.975, freedom), rel=1e-6)


def test_groups_of_runs() -> None:
    first, second = [3.1, 3.2, 3.15], [3.0, 3.02, 3.3, 2.9]
    found, welch = compare_groups(first, second), ttest_ind(second, first, equal_var=False)
    assert found.p_value == pytest.approx(welch.pvalue)
    assert found.interval == pytest.approx(welch.confidence_interval())
    assert compare_groups([1.0, 1.0], [1.0, 1.0]).p_value == 1
