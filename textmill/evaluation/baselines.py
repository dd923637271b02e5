"""Two baselines made of counts, to show what a net adds: a unigram model, and a bigram model that falls back to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.store import TokenStore

MAX_COUNTED = 20_000_000
"""At most this many train tokens are counted: their pairs take 160 MB."""
BLOCK = 1 << 20

Ids = NDArray[np.int64]
Probabilities = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """How often tokens and pairs of tokens occur; a pair is the number `previous * vocab + token`."""

    vocab: int
    counted: int
    """Tokens counted."""
    tokens_V: Ids
    """Occurrences of each token."""
    pairs: Ids
    """Every pair that occurs, sorted."""
    pair_counts: Ids
    """Occurrences of each of them."""

    @cached_property
    def unigram_V(self) -> Probabilities:
        """The probability of each token, with add-one smoothing."""
        probabilities: Probabilities = (self.tokens_V + 1.0) / (self.counted + self.vocab)
        return probabilities

    @cached_property
    def followers_V(self) -> Probabilities:
        """How many tokens follow each token."""
        return np.bincount(self.pairs // self.vocab, self.pair_counts, self.vocab).astype(np.float64)

    @cached_property
    def distinct_followers_V(self) -> Probabilities:
        """How many different tokens follow each token."""
        return np.bincount(self.pairs // self.vocab, minlength=self.vocab).astype(np.float64)

    def unigram(self, tokens: Ids) -> Probabilities:
        """The probability of each token, whatever precedes it."""
        return self.unigram_V[tokens]

    def bigram(self, previous: Ids, tokens: Ids) -> Probabilities:
        """The probability of each token after the previous one.

        Witten-Bell: where n tokens, k of them different, follow `previous`, a part n / (n + k) goes to the bigram
        counts and k / (n + k) to the unigram, so unseen pairs get a probability too and the sum over all tokens is one.
        """
        pairs = previous * self.vocab + tokens
        places = np.searchsorted(self.pairs, pairs)
        is_seen = places < len(self.pairs)
        is_seen[is_seen] = self.pairs[places[is_seen]] == pairs[is_seen]
        times = np.zeros(len(pairs))
        times[is_seen] = self.pair_counts[places[is_seen]]
        followers = self.followers_V[previous]
        distinct = self.distinct_followers_V[previous]
        unigram = self.unigram(tokens)
        return np.where(followers > 0, (times + distinct * unigram) / np.maximum(followers + distinct, 1), unigram)


def count(*stores: TokenStore, vocab: int, first: int, limit: int = MAX_COUNTED, answers_only: bool = False) -> Counts:
    """Count the tokens and pairs of stores, one after the other, up to `limit` tokens; perhaps assistant tokens
    only."""
    counted = min(sum(store.tokens for store in stores), limit)
    tokens_V = np.zeros(vocab, np.int64)
    pairs = np.empty(counted, np.int64)
    filled = 0
    for store in stores:
        for previous, tokens in _blocks(store, vocab, first, min(store.tokens, counted - filled), answers_only):
            tokens_V += np.bincount(tokens, minlength=vocab)
            pairs[filled : filled + len(tokens)] = previous * vocab + tokens
            filled += len(tokens)
    pairs = pairs[:filled]
    counted = filled
    pairs.sort()
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]])) if counted else np.zeros(0, np.int64)
    return Counts(vocab, counted, tokens_V, pairs[starts], np.diff(starts, append=counted))


def sum_losses(counts: Counts, *stores: TokenStore, first: int, answers_only: bool = False) -> dict[str, float]:
    """The summed loss in nats of every token of stores, or of assistant tokens, for each of the two models."""
    losses = {"unigram": 0.0, "bigram": 0.0}
    for store in stores:
        for previous, tokens in _blocks(store, counts.vocab, first, store.tokens, answers_only):
            losses["unigram"] -= float(np.log(counts.unigram(tokens)).sum())
            losses["bigram"] -= float(np.log(counts.bigram(previous, tokens)).sum())
    return losses


def _blocks(store: TokenStore, vocab: int, first: int, end: int, answers_only: bool) -> Iterator[tuple[Ids, Ids]]:
    """The token before each token and the tokens, block by block; `first` is the token before the first."""
    last_token = first
    for begin in range(0, end, BLOCK):
        block: NDArray[Any] = store.ids[begin : min(begin + BLOCK, end)]
        tokens = block.astype(np.int64)
        if int(tokens.max()) >= vocab or int(tokens.min()) < 0:
            raise TextmillError(
                f"{store.prefix}: token ids from {tokens.min()} to {tokens.max()} found, the vocabulary has {vocab:,}; "
                f"write it again with: textmill tokenize WHERE --force"
            )
        previous_tokens = np.concatenate([[last_token], tokens[:-1]])
        if answers_only and store.loss_mask is not None:
            is_answer = np.asarray(store.loss_mask[begin : begin + len(tokens)]) > 0
            yield previous_tokens[is_answer], tokens[is_answer]
        else:
            yield previous_tokens, tokens
        last_token = int(tokens[-1])
