"""Metrics of labels: scikit-learn's numbers, seqeval's published example, SQuAD's official rules."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

import numpy as np
import pytest

from textmill.corpus.labelled import Example
from textmill.errors import TextmillError
from textmill.evaluation.labelled import squad
from textmill.evaluation.labelled.measuring import AnswerMeasure, ConfusionMatrix, EntityCounts, find_entities
from textmill.evaluation.labelled.squad import AnswerScores, exact_match, f1_score, find_best_answer, normalize_answer
from textmill.tokens.labelled import Sample


@pytest.mark.long  # scikit-learn comes with lm-eval, which only the long tests install
@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_classes_have_the_metrics_of_scikit_learn(classes: int, seed: int) -> None:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    dice = np.random.default_rng(seed)
    expected = dice.integers(0, classes if seed else classes - 1, 40)  # one class may not occur
    predicted = np.where(dice.random(40) < 0.5, expected, dice.integers(0, max(1, classes - seed % 2), 40))
    matrix = ConfusionMatrix([f"L{number}" for number in range(classes)])
    for start in range(0, 40, 10):
        matrix.add(expected[start : start + 10], predicted[start : start + 10])
    assert matrix.accuracy() == pytest.approx(accuracy_score(expected, predicted))
    assert matrix.macro_f1() == pytest.approx(f1_score(expected, predicted, average="macro"))
    assert matrix.matthews() == pytest.approx(matthews_corrcoef(expected, predicted))


def test_one_predicted_class_has_no_correlation() -> None:
    matrix = ConfusionMatrix(["a", "b"])
    matrix.add([0, 1, 1], [1, 1, 1])
    assert matrix.matthews() == 0.0


def test_the_published_example_of_seqeval() -> None:
    """From seqeval's README: F1 is 0.50."""
    expected = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    counts = EntityCounts()
    for one, other in zip(expected, predicted, strict=True):
        counts.add(one, other)
    assert counts.metrics() == {"entity_f1": 0.5, "entity_precision": 0.5, "entity_recall": 0.5}


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),  # the example of seqeval's get_entities
        ("I-PER I-PER O", {("PER", 0, 1)}),  # IOB1: an entity may start with I
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("B-PER I-LOC", {("PER", 0, 0), ("LOC", 1, 1)}),
        ("S-PER B-LOC I-LOC E-LOC", {("PER", 0, 0), ("LOC", 1, 3)}),  # IOBES
        ("U-PER B-LOC L-LOC U-LOC", {("PER", 0, 0), ("LOC", 1, 2), ("LOC", 3, 3)}),  # BILOU
        ("E-PER I-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities_by_the_rules_of_conlleval(labels: str, entities: set[Any]) -> None:
    assert find_entities(labels.split()) == entities


def official_tokens(text: str) -> list[str]:
    """The words of an answer by the rules that SQuAD publishes, one rule after the other."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


PAIRS = [
    ("The Norman Conquest!", "norman conquest", 1.0, 1.0),
    ("Denver Broncos", "the Denver Broncos team", 0.0, 0.8),
    ("in Seoul, South Korea", "Seoul", 0.0, 0.4),
    ("an apple a day", "apple day", 1.0, 1.0),
    ("theory", "ory", 0.0, 0.0),
    ("U.S.", "us", 1.0, 1.0),
    ("서울특별시", "서울특별시", 1.0, 1.0),
    ("1,000", "1000", 1.0, 1.0),
    ("b b c", "b c c", 0.0, 2 / 3),
]


@pytest.mark.parametrize(("answer", "expected", "exact", "f1"), PAIRS)
def test_exact_match_and_f1_of_squad(answer: str, expected: str, exact: float, f1: float) -> None:
    assert exact_match(answer, expected) == exact
    found, wanted = official_tokens(answer), official_tokens(expected)
    same = sum((Counter(found) & Counter(wanted)).values())
    formula = 2 * same / (len(found) + len(wanted)) if same else 0.0
    assert f1_score(answer, expected, version_2=False) == pytest.approx(f1) == formula
    assert normalize_answer(answer) == " ".join(found)


def test_scores_of_both_versions() -> None:
    first = AnswerScores(version_2=False)
    first.add("Denver Broncos", ["Carolina Panthers", "the Denver Broncos team"])
    first.add("", ["Seoul"])
    assert first.metrics() == {"exact_match": 0.0, "f1": pytest.approx(40.0)}
    second = AnswerScores(version_2=True)
    second.add("", [])
    second.add("Seoul", [])
    second.add("", ["Seoul"])
    second.add("seoul", ["Seoul", "the"])
    assert second.metrics() == {
        "exact_match": 50.0,
        "f1": 50.0,
        "has_answer_exact_match": 50.0,
        "has_answer_f1": 50.0,
        "no_answer_exact_match": 50.0,
        "no_answer_f1": 50.0,
    }


def best_by_trial(samples: list[Sample], logits: list[Any], longest: int) -> tuple[float, str, str]:
    """The best span of all, by trying each; with the windows' texts in place of a context."""
    best = (-np.inf, 0, 0)
    for sample, one in zip(samples, logits, strict=True):
        assert sample.spans is not None
        for first in range(len(sample.ids)):
            for last in range(first, min(first + longest, len(sample.ids))):
                if sample.spans[first, 0] >= 0 and sample.spans[last, 0] >= 0:
                    best = max(best, (one[0, first] + one[1, last], sample.spans[first, 0], sample.spans[last, 1]))
    return best  # type: ignore[return-value]


@pytest.mark.parametrize("seed", range(5))
def test_the_best_answer_of_all_windows(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squad, "MAX_TOKENS", 4)
    dice = np.random.default_rng(seed)
    context = "".join(chr(ord("a") + number) for number in range(26))
    samples, logits = [], []
    for start in (0, 8, 16):
        spans = np.array([[-1, -1]] * 3 + [[start + place, start + place + 1] for place in range(10)] + [[-1, -1]])
        samples.append(Sample(np.zeros(14, np.int32), np.zeros(14, np.int32), spans=spans.astype(np.int32)))
        logits.append(dice.normal(size=(2, 14)).astype(np.float32))
    score, start, end = best_by_trial(samples, logits, 4)
    assert find_best_answer(context, samples, logits, no_answer=False) == context[start:end]
    for added, text in ((0.01, ""), (-0.01, context[start:end])):
        for one in logits:  # the score of no answer is the lowest of all windows
            one[:, 0] = (score + added) / 2 + dice.random()
        logits[seed % 3][:, 0] = (score + added) / 2
        assert find_best_answer(context, samples, logits, no_answer=True) == text


def test_a_question_twice_is_not_left_out_of_the_predictions() -> None:
    measure = AnswerMeasure(no_answer=True)
    sample = Sample(np.zeros(2, np.int32), np.zeros(2, np.int32), spans=np.array([[-1, -1], [0, 3]], np.int32))
    example, logits = Example("f", "line 3", ("Who?", "Kim"), answers=(("Kim", 0),), id="q1"), np.zeros((2, 2))
    measure.add(example, [sample], [logits.astype(np.float32)])
    with pytest.raises(TextmillError, match="f:3: the id 'q1' occurs twice; each question needs its own"):
        measure.add(example, [sample], [logits.astype(np.float32)])
