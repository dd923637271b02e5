"""Log-likelihoods of continuations equal those computed from transformers' logits, whatever is in the same batch."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from textmill.checkpoints.folders import Checkpoint
from textmill.config import EvaluateConfig, ModelConfig, RunConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.evaluation import packing, scorer_torch
from textmill.evaluation.packing import build_trees, fill_rows, pack
from textmill.evaluation.scorer_torch import TorchScorer, open_scorer
from textmill.evaluation.task import Score
from textmill.models import initial_weights, open_family
from textmill.models.nets_torch import fill, new_net
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

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
    wanted = [reference(model, *pair, scorer.tokenizer.eos_id) for pair in pairs]
    assert [one.greedy for one in wanted][-4:] == [True, False, True, False]
    assert_equal(scorer.score_tokens(pairs), wanted)


def shared_contexts(count: int, vocab: int) -> list[Pair]:
    """Several continuations of each context, some of one token, some equal, some of them prefixes of others."""
    dice = random.Random(6)
    pairs: list[Pair] = []
    for _ in range(count):
        context = [dice.randrange(vocab) for _ in range(dice.randint(0, 22))]
        long = [dice.randrange(vocab) for _ in range(dice.randint(2, 6))]
        pairs += [(context, long), (context, long[:1]), (context, [*long, 7]), (context, long), (context, [5])]
    dice.shuffle(pairs)
    return pairs


@pytest.mark.parametrize("row_tokens", [0, 50, 200])
def test_shared_contexts_and_packed_rows_change_nothing(
    scorer: TorchScorer, model: Any, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with one text, and rows longer than the model's positions that hold many."""
    monkeypatch.setattr(scorer_torch, "CPU_ROW_TOKENS", row_tokens)
    pairs = shared_contexts(9, scorer.vocab)
    assert_equal(scorer.score_tokens(pairs), [reference(model, *pair, scorer.tokenizer.eos_id) for pair in pairs])


def test_a_short_context_is_not_shared_by_everything() -> None:
    """Attention is quadratic: windows that happen to start after the same token must not end in one row."""
    trees = build_trees([([1], [number] * 64) for number in range(100)], first=9, positions=64)
    assert max(tree.tokens for tree in trees) <= 256
    assert sum(len(tree.branches) for tree in trees) == 100
    four = build_trees([([1] * 900, [number] * 100) for number in range(4)], first=9, positions=1024)
    assert len(four) == 1


def test_a_shared_context_is_read_once() -> None:
    trees = build_trees([([1, 2, 3], [4]), ([1, 2, 3], [5, 6]), ([], [5])], first=9, positions=8)
    assert [(tree.context, list(tree.branches), tree.tokens) for tree in trees] == [
        ((1, 2, 3), [(4,), (5, 6)], 4),
        ((9,), [(5,)], 1),
    ]


@pytest.mark.parametrize("row_tokens", [0, 120])
def test_questions_after_the_same_examples_read_them_once(
    scorer: TorchScorer, model: Any, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a question that has nothing of its own, and questions that have less or nothing in common with others."""
    monkeypatch.setattr(packing, "SHARED_TOKENS", 6)
    monkeypatch.setattr(scorer_torch, "CPU_ROW_TOKENS", row_tokens)
    dice = random.Random(7)
    examples = [dice.randrange(scorer.vocab) for _ in range(14)]
    contexts = [examples + [dice.randrange(scorer.vocab) for _ in range(count)] for count in (3, 5, 0, 4)]
    contexts += [[*examples[:12], 3, 4], examples[:7] + [5] * 8, examples[:2] + [6] * 9]
    pairs: list[Pair] = [(context, choice) for context in contexts for choice in ([7, 8, 9], [7], [8, 1])]
    trees = build_trees(pairs, first=9, positions=24)
    assert [(tree.context, len(tree.children), tree.texts) for tree in trees] == [
        (tuple(examples[:12]), 5, 15),
        (tuple(contexts[5]), 0, 3),
        (tuple(contexts[6]), 0, 3),
    ]
    assert trees[0].tokens == 12 + (5 + 7 + 2 + 6 + 2) + 5 * 3
    assert_equal(scorer.score_tokens(pairs), [reference(model, *pair, scorer.tokenizer.eos_id) for pair in pairs])


@given(
    st.lists(st.tuples(st.integers(1, 30), st.lists(st.integers(1, 9), min_size=1)), max_size=20), st.integers(0, 90)
)
def test_every_target_token_is_predicted_once(sizes: list[tuple[int, list[int]]], row_tokens: int) -> None:
    """All token ids differ, so a token that is lost, repeated or predicted after another token would show."""
    ids = itertools.count()
    pairs: list[Pair] = []
    for context, continuations in sizes:
        shared = list(itertools.islice(ids, context))
        pairs += [(shared, list(itertools.islice(ids, length))) for length in continuations]
    seen: list[tuple[int, int, int]] = []
    for packed in pack(build_trees(pairs, first=0, positions=40), row_tokens=row_tokens, batch_tokens=100):
        rows = fill_rows(packed, pad=0)
        before = rows.ids_NT.ravel()[rows.places_M].tolist()
        positions = rows.positions_NT.ravel()[rows.places_M].tolist()
        seen += zip(before, positions, rows.labels_M.tolist(), strict=True)
    texts = [([*context, *continuation], len(context)) for context, continuation in pairs]
    wanted = [(text[at - 1], at - 1, text[at]) for text, start in texts for at in range(start, len(text))]
    assert sorted(seen) == sorted(wanted)


def test_a_family_in_a_file_with_fewer_key_heads(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Rotary positions and grouped-query attention: packed rows equal each pair scored alone."""
    family: Any = open_family(str(Path(__file__).parents[2] / "examples" / "mynet.py"))
    config = RunConfig(model=ModelConfig(family=str(Path(__file__).parents[2] / "examples" / "mynet.py")))
    shape = family.shape_of(config.model, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id, length=32)
    net = new_net(shape, torch.device("cpu"))
    fill(net, initial_weights(shape, 1), "mynet")
    scorer = TorchScorer(cast(Checkpoint, SimpleNamespace(folder=tmp_path)), net, tokenizer, 4)
    pairs = shared_contexts(5, tokenizer.vocab)
    assert_equal(scorer.score_tokens(pairs), [scorer.score_tokens([pair])[0] for pair in pairs])


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
