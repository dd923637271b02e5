"""The end of a run in plain words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from textmill.planning.verdict import FinishedRun, describe_quality, describe_state, read_curves, state_of

FALLING, RISING = {100: 4.0, 200: 3.5, 300: 3.2}, {100: 4.0, 200: 3.5, 300: 3.9}


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (FinishedRun(5_000_000, 2_000_000, 50_000_000, RISING), "overfitting"),
        (FinishedRun(5_000_000, 2_000_000, 30_000_000, FALLING), "limited by the text"),
        # nanochat's law wants 11 tokens for each parameter: 1,364M tokens for 124M parameters.
        (FinishedRun(124_000_000, 1_000_000_000, 400_000_000, FALLING), "undertrained"),
        (FinishedRun(124_000_000, 1_000_000_000, 1_400_000_000, FALLING), "finished"),
        (FinishedRun(124_000_000, 1_000_000_000, 1_400_000_000, FALLING, train_loss=2.6), "limited by the text"),
        (FinishedRun(124_000_000, 1_000_000_000, 1_400_000_000, FALLING, train_loss=2.9), "finished"),
        # More time does not help a net that knows its text; within the first epoch it cannot know it.
        (FinishedRun(124_000_000, 1_000_000, 9_000_000, FALLING, train_loss=2.6), "limited by the text"),
        (FinishedRun(124_000_000, 1_000_000, 6_000_000, FALLING, train_loss=3.1), "undertrained"),
        (FinishedRun(20_000_000, 1_000_000_000, 900_000_000, FALLING, train_loss=2.6), "finished"),
        (FinishedRun(124_000_000, 1_000_000, 400_000, FALLING, from_scratch=False), "finished"),
        (FinishedRun(5_000_000, 2_000_000, 30_000_000, {}), "unknown"),
    ],
)
def test_states(facts: FinishedRun, state: str) -> None:
    assert state_of(facts) == state
    assert describe_state(facts).lower().startswith(state.split()[0][:7]) or state in ("finished", "unknown")


def test_overfitting_names_where_it_began() -> None:
    text = describe_state(FinishedRun(5_000_000, 2_000_000, 50_000_000, RISING))
    assert "3.5000 to 3.9000 since step 200" in text
    assert "25 epochs" in text


def test_the_size_that_is_named_counts_the_embeddings() -> None:
    facts = FinishedRun(130_000, 900_000, 50_000, FALLING, all_parameters=190_000)
    assert "a net of 0.2M parameters" in describe_state(facts)
    assert "a net of 0.1M parameters" in describe_state(replace(facts, all_parameters=None))


def test_what_a_net_knows_by_heart_is_named() -> None:
    facts = FinishedRun(124_000_000, 1_000_000_000, 1_400_000_000, FALLING, train_loss=2.6)
    assert "its loss is 2.60 on that text and 3.20 on text that is new to it" in describe_state(facts)
    assert "its loss" not in describe_state(replace(facts, tokens=9_000_000_000, train_loss=3.1))


def test_the_training_loss_is_that_of_the_last_steps(tmp_path: Path) -> None:
    assert read_curves(tmp_path).train_loss is None
    rows = [{"step": step, "loss": 5 - step / 100} for step in range(10, 210, 10)] + [{"step": 200, "valid_loss": 4.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curves(tmp_path).train_loss == pytest.approx((3.1 + 3.0) / 2)


def test_epochs_are_the_last_logged_ones(tmp_path: Path) -> None:
    assert read_curves(tmp_path).epochs is None
    rows = [{"step": 1, "epoch": 0.5}, {"step": 2, "epoch": 1.25}, {"step": 2, "valid_loss": 3.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curves(tmp_path).epochs == 1.25
    assert read_curves(tmp_path).valid_losses == {2: 3.0}


def test_a_continued_model_is_not_called_trained_enough() -> None:
    falling = FinishedRun(124_000_000, 1_000_000, 80_000, FALLING, from_scratch=False)
    text = describe_state(falling)
    assert text.startswith("No overfitting: it saw 0.08 epochs of 1,000,000 tokens; the last valid loss is the lowest")


CARD = {"split": "test"}


def test_answers_are_compared_with_counting_by_their_loss() -> None:
    for loss, lines in ((4.4, 1), (1.9, 0)):
        assert len(describe_quality({"perplexity": {"loss": loss, "loss/bigram": 2.0, "card": CARD}})) == lines


def test_quality_is_compared_with_counting() -> None:
    found = {"bits_per_byte": 2.0, "bits_per_byte/unigram": 3.5, "bits_per_byte/bigram": 2.75, "card": CARD}
    text = " ".join(describe_quality({"perplexity": found}))
    assert "2.000 bits per byte" in text
    assert "25% of its size" in text
    assert "2.750" in text
    assert "3.500" in text
    assert "learnt almost nothing" in " ".join(describe_quality({"perplexity": {**found, "bits_per_byte": 2.8}}))
    assert describe_quality(None) == describe_quality({"perplexity": {"loss": 1.0, "card": CARD}}) == []


def test_the_curve_is_read_from_the_metrics(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "valid_loss": 4.5}, {"step": 3, "valid_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_curves(tmp_path).valid_losses == {2: 4.5}
    assert read_curves(tmp_path / "none").valid_losses == {}
