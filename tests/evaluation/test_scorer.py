"""Log-likelihoods of continuations equal those computed from transformers' logits, whatever is in the same batch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EvaluateConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.task import Score

Pair = tuple[list[int], list[int]]


@pytest.fixture(scope="module")
def scorer(checkpoint: Checkpoint) -> TorchScorer:
    return open_scorer(checkpoint, TorchEngine(device="cpu", precision="fp32"), batch=4)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Any:
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder)


def reference(model: Any, context: list[int], continuation: list[int], end: int) -> Score:
    """One pair by itself, in double precision after the logits."""
    ids = ([*context] or [end]) + continuation
    ids = ids[-(model.config.n_positions + 1) :]
    with torch.no_grad():
        logits = model(torch.tensor([ids[:-1]])).logits[0].double()[-len(continuation) :]
    chosen = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return Score(float(chosen.sum()), len(continuation), logits.argmax(-1).tolist() == continuation)


def assert_equal(found: list[Score], wanted: list[Score]) -> None:
    assert [(one.tokens, one.greedy) for one in found] == [(one.tokens, one.greedy) for one in wanted]
    assert [one.log_likelihood for one in found] == pytest.approx([one.log_likelihood for one in wanted], rel=1e-5)


def random_pairs(count: int, vocab: int) -> list[Pair]:
    dice = random.Random(5)

    def ids(least: int, most: int) -> list[int]:
        return [dice.randrange(vocab) for _ in range(dice.randint(least, most))]

    return [(ids(0, 40), ids(1, 24)) for _ in range(count)]


def greedy_continuation(model: Any, context: list[int], count: int) -> list[int]:
    ids = list(context)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(context) :]


def test_scores_equal_those_of_transformers(scorer: TorchScorer, model: Any) -> None:
    """Different lengths in one batch, empty and too long contexts, greedy and other continuations."""
    pairs = random_pairs(30, scorer.vocab)
    for context in ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3]):
        likeliest = greedy_continuation(model, context, 4)
        pairs += [(context, likeliest), (context, [*likeliest[:-1], (likeliest[-1] + 1) % scorer.vocab])]
    assert any(not context for context, _ in pairs)
    assert any(len(context) + len(continuation) > scorer.positions + 1 for context, continuation in pairs)
    wanted = [reference(model, *pair, scorer.tokenizer.end) for pair in pairs]
    assert [one.greedy for one in wanted][-4:] == [True, False, True, False]
    assert_equal(scorer.score_tokens(pairs), wanted)


def test_the_batch_size_does_not_change_the_scores(checkpoint: Checkpoint, scorer: TorchScorer) -> None:
    pairs = random_pairs(9, scorer.vocab)
    one_by_one = open_scorer(checkpoint, TorchEngine(device="cpu", precision="fp32"), EvaluateConfig(batch=1).batch)
    assert_equal(one_by_one.score_tokens(pairs), scorer.score_tokens(pairs))


def test_texts_are_encoded_as_running_text(scorer: TorchScorer) -> None:
    """The space before a word belongs to its token, on whichever side of the border it is written."""
    encode = scorer.tokenizer.encode
    whole = encode("the mill turns")
    context = encode("the mill")
    assert whole[: len(context)] == context
    wanted = scorer.score_tokens([(context, whole[len(context) :]), ([], encode("turns"))])
    assert scorer.score_texts([("the mill", " turns"), ("", "turns")]) == wanted
    assert scorer.score_texts([("the mill ", "turns"), ("", "turns")]) == wanted


def test_nothing_to_score(scorer: TorchScorer) -> None:
    assert scorer.score_tokens([]) == []


@pytest.mark.parametrize(
    ("continuation", "message"),
    [([], "has 0 tokens"), ([1] * 25, "has 25 tokens; the model scores from 1 to 24"), ([100_000], "the model knows")],
)
def test_a_continuation_that_cannot_be_scored_raises_an_error(
    scorer: TorchScorer, continuation: list[int], message: str
) -> None:
    with pytest.raises(TextmillError, match=message):
        scorer.score_tokens([([1, 2], continuation)])
