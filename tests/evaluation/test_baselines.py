"""The baselines equal slow ones made of dictionaries, and their probabilities sum to one."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.errors import TextmillError
from textmill.evaluation.tasks import perplexity
from textmill.evaluation.tasks.perplexity import count, sum_losses
from textmill.tokens.store import Index, TokenStore

VOCAB, FIRST = 7, 0
streams = st.lists(st.integers(0, VOCAB - 1), max_size=60)


def store_of(ids: list[int]) -> TokenStore:
    index = Index(Path("some"), np.dtype(np.int32), np.array([len(ids)]), np.zeros(1, np.int64), 1, np.array([0, 1]))
    return TokenStore(Path("some"), np.array(ids, np.int32), index, 0, 1)


def slow_losses(train: list[int], valid: list[int]) -> dict[str, float]:
    """The definitions, written out."""
    seen, followers = Counter(train), defaultdict(Counter)  # type: ignore[var-annotated]
    for before, token in zip([FIRST, *train], train, strict=False):
        followers[before][token] += 1
    losses = {"unigram": 0.0, "bigram": 0.0}
    for before, token in zip([FIRST, *valid], valid, strict=False):
        unigram = (seen[token] + 1) / (len(train) + VOCAB)
        after, kinds = sum(followers[before].values()), len(followers[before])
        bigram = (followers[before][token] + kinds * unigram) / (after + kinds) if after else unigram
        losses["unigram"] -= math.log(unigram)
        losses["bigram"] -= math.log(bigram)
    return losses


@settings(max_examples=150, deadline=None)
@given(streams, streams, st.integers(1, 9))
def test_losses_equal_those_of_dictionaries(train: list[int], valid: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(perplexity, "BLOCK", block)
        counts = count(store_of(train), vocab=VOCAB, first=FIRST)
        found = sum_losses(counts, store_of(valid), first=FIRST)
    assert found == pytest.approx(slow_losses(train, valid), rel=1e-12)


@settings(max_examples=100, deadline=None)
@given(streams)
def test_probabilities_after_any_token_sum_to_one(train: list[int]) -> None:
    counts = count(store_of(train), vocab=VOCAB, first=FIRST)
    every = np.arange(VOCAB)
    assert counts.unigram(every).sum() == pytest.approx(1, abs=1e-12)
    for before in range(VOCAB):
        probabilities = counts.bigram(np.full(VOCAB, before), every)
        assert probabilities.sum() == pytest.approx(1, abs=1e-12)
        assert (probabilities > 0).all()


def test_at_most_the_limit_is_counted() -> None:
    counts = count(store_of([1, 2, 3, 4, 5]), vocab=VOCAB, first=FIRST, limit=3)
    assert counts.counted == 3
    assert counts.tokens_V.tolist() == [0, 1, 1, 1, 0, 0, 0]


def test_a_vocabulary_of_two_million_fits_in_memory() -> None:
    vocab = 2_000_000
    counts = count(store_of([vocab - 1, vocab - 2, vocab - 1, vocab - 2, 5]), vocab=vocab, first=0)
    probabilities = counts.bigram(np.array([vocab - 1]), np.array([vocab - 2]))
    unigram = 3 / (5 + vocab)
    assert probabilities[0] == pytest.approx((2 + unigram) / 3)


def test_ids_outside_the_vocabulary_raise_an_error(new_store: Callable[[list[int]], TokenStore]) -> None:
    with pytest.raises(TextmillError, match="token ids from 1 to 9 found, the vocabulary has 7"):
        count(new_store([1, 9, 2]), vocab=VOCAB, first=FIRST)
