"""Two models that only count, to show what a net adds: a unigram, and a bigram that falls back on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.store import TokenStore

MOST_COUNTED = 20_000_000
"""Train tokens that are counted at most: their pairs take 160 MB."""
BLOCK = 1 << 20

Ids = NDArray[np.int64]
Chances = NDArray[np.float64]


@dataclass(frozen=True)
class Counts:
    """What was seen in a stream: tokens, and pairs as sorted codes `before * vocab + token`."""

    vocab: int
    counted: int
    """Tokens looked at."""
    tokens_V: Ids
    """How often each token was there."""
    codes: Ids
    """Every pair that was there, in order."""
    times: Ids
    """How often each of them was."""

    @cached_property
    def unigram_V(self) -> Chances:
        """The chance of each token, each counted once more than it was seen."""
        chances: Chances = (self.tokens_V + 1.0) / (self.counted + self.vocab)
        return chances

    @cached_property
    def after_V(self) -> Chances:
        """How many tokens followed each token."""
        return np.bincount(self.codes // self.vocab, self.times, self.vocab).astype(np.float64)

    @cached_property
    def kinds_V(self) -> Chances:
        """How many different tokens followed each token."""
        return np.bincount(self.codes // self.vocab, minlength=self.vocab).astype(np.float64)

    def unigram(self, tokens: Ids) -> Chances:
        """The chance of each token, wherever it stands."""
        return self.unigram_V[tokens]

    def bigram(self, before: Ids, tokens: Ids) -> Chances:
        """The chance of each token after the one before it.

        Witten and Bell: with n tokens of k kinds seen after `before`, n parts go to what was seen and k to the unigram,
        so a token never seen there has a chance too and the chances after any token sum to one.
        """
        pairs = before * self.vocab + tokens
        places = np.searchsorted(self.codes, pairs)
        times = np.zeros(len(pairs))
        found = places < len(self.codes)
        found[found] = self.codes[places[found]] == pairs[found]
        times[found] = self.times[places[found]]
        after, kinds, unigram = self.after_V[before], self.kinds_V[before], self.unigram(tokens)
        return np.where(after > 0, (times + kinds * unigram) / np.maximum(after + kinds, 1), unigram)


def count(*stores: TokenStore, vocab: int, first: int, most: int = MOST_COUNTED) -> Counts:
    """Count the tokens and pairs of the beginning of stores, one after the other; the whole of them if they have no more than `most`."""
    counted = min(sum(store.tokens for store in stores), most)
    tokens_V, pairs = np.zeros(vocab, np.int64), np.empty(counted, np.int64)
    filled = 0
    for store in stores:
        for before, tokens in _blocks(store, vocab, first, min(store.tokens, counted - filled)):
            tokens_V += np.bincount(tokens, minlength=vocab)
            pairs[filled : filled + len(tokens)] = before * vocab + tokens
            filled += len(tokens)
    pairs.sort()
    starts = np.flatnonzero(np.concatenate([[True], pairs[1:] != pairs[:-1]])) if counted else np.zeros(0, np.int64)
    return Counts(vocab, counted, tokens_V, pairs[starts], np.diff(starts, append=counted))


def losses_of(counts: Counts, *stores: TokenStore, first: int) -> dict[str, float]:
    """The summed loss in nats of every token of stores under each of the two models."""
    losses = {"unigram": 0.0, "bigram": 0.0}
    for store in stores:
        for before, tokens in _blocks(store, counts.vocab, first, store.tokens):
            losses["unigram"] -= float(np.log(counts.unigram(tokens)).sum())
            losses["bigram"] -= float(np.log(counts.bigram(before, tokens)).sum())
    return losses


def _blocks(store: TokenStore, vocab: int, first: int, end: int) -> Iterator[tuple[Ids, Ids]]:
    """Tokens with the one before each, a block at a time; before the first stands `first`."""
    previous = first
    for begin in range(0, end, BLOCK):
        block: NDArray[Any] = store.ids[begin : min(begin + BLOCK, end)]
        tokens = block.astype(np.int64)
        if int(tokens.max()) >= vocab or int(tokens.min()) < 0:
            raise TextmillError(
                f"{store.prefix}: holds token ids from {tokens.min()} to {tokens.max()}, the vocabulary has {vocab:,}; "
                f"make it anew with: textmill tokenize --force"
            )
        yield np.concatenate([[previous], tokens[:-1]]), tokens
        previous = int(tokens[-1])
