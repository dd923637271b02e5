"""Perplexity and bits per byte of a split or a text, or loss and accuracy of a chat model's answers, next to two
baselines.

Every token is predicted exactly once, in sliding windows. With evaluate.window=4 and evaluate.stride=2, the tokens
a b c d e f g h are read in three windows, and only the tokens in capitals count there:

    A B C D
        c d E F          c and d are context: the first window has predicted them
            e f G H

A smaller stride gives tokens more context and takes more time; the default is a stride of one window. The perplexity
is exp(summed loss / tokens); per word and per byte the same sum is divided by the words and bytes of the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import SAMPLE_SEED
from textmill.evaluation.metrics import compute_metrics, document_interval, metric_intervals
from textmill.evaluation.split_tokens import SplitTokens
from textmill.evaluation.task import ItemLog, LossPart, Measured, NextTokenScorer, StoreLoss, TaskEntry
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

FILES = "none: a split of the run, or evaluate.text"
FILE_OPTIONAL = True
BASELINE_METRICS = ("loss", "token_perplexity", "bits_per_byte")
"""Metrics of the two baselines that are shown."""
SMOOTHING = "unigram: add-one; bigram: interpolated Witten-Bell over that unigram"
MAX_LOGGED = 200_000
"""Of more documents there is no log."""
SHOWN_START = 60
"""Characters of a document in the log."""


def measure(scorer: NextTokenScorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Sum the loss of every token of a split or text and divide it by tokens, words and bytes."""
    with entry.open_tokens() as tokens:
        window, stride = find_windows(settings, scorer.positions, tokens.trained_length)
        is_chat = tokens.is_chat and tokens.has_answers
        if is_chat:
            measured = _measure_answers(scorer, tokens, window, settings.split)
        else:
            measured = _measure_windows(scorer, settings, tokens, window, stride)
        if settings.baselines and tokens.train:
            metrics, counted = _measure_baselines(tokens, scorer.tokenizer.first_id, is_chat)
            measured.metrics.update(metrics)
            measured.card["baselines"] = counted
    return measured


def find_windows(settings: EvaluateConfig, positions: int, trained_length: int | None = None) -> tuple[int, int]:
    """The tokens of a window, and those between the starts of two."""
    if (settings.window or 0) > positions:
        raise TextmillError(
            f"evaluate.window: {settings.window} is more than the model's {positions} positions; lower it"
        )
    window = settings.window or min(trained_length or positions, positions)
    stride = settings.stride or window
    if stride > window:
        raise TextmillError(
            f"evaluate.stride: {stride} is more than the window of {window} tokens, so some would be left out; lower it"
        )
    return window, stride


def _measure_windows(
    scorer: NextTokenScorer, settings: EvaluateConfig, tokens: SplitTokens, window: int, stride: int
) -> Measured:
    store_losses = [
        scorer.sum_losses(store, length=window, stride=stride, sample=settings.sample, seed=SAMPLE_SEED)
        for store in tokens.stores
    ]
    predicted = sum(measured.tokens for measured in store_losses)
    if not predicted:
        raise TextmillError(f"{tokens.stores[0].prefix}: has no token to predict; give it more text")
    mean_loss = sum(measured.loss for measured in store_losses) / predicted
    parts: list[LossPart] = []
    for measured in store_losses:  # the documents of the next store have higher numbers
        offset = parts[-1].document + 1 if parts else 0
        parts += [part._replace(document=part.document + offset) for part in measured.parts]
    # The mean loss of sampled windows stands for that of all tokens.
    counts = {**tokens.counts, "tokens": predicted if settings.sample is None else tokens.counts["tokens"]}
    interval, interval_method = document_interval(parts)
    card = {
        **({} if settings.text else {"split": settings.split}),
        **counts,
        **tokens.facts,
        "window": window,
        "stride": stride,
        "first_token": "predicted",
        "interval": interval_method,
    }
    items: Sequence[ItemLog] = ()
    if settings.sample is not None:
        windows = sum(measured.windows for measured in store_losses)
        card |= {"sample": windows, "seed": SAMPLE_SEED, "counted": predicted}
    elif tokens.counts["documents"] <= MAX_LOGGED:
        items = list(_document_items(scorer.tokenizer, tokens.stores, store_losses))
    metrics = compute_metrics(mean_loss * counts["tokens"], counts, str(scorer.checkpoint.folder))
    return Measured(metrics, card, metric_intervals(interval, counts), mean_loss, items)


def _document_items(
    tokenizer: TextTokenizer, stores: Sequence[TokenStore], measured: Sequence[StoreLoss]
) -> Iterator[ItemLog]:
    """The summed loss of each document; its id is a hash of its text, which is the same for any tokenizer."""
    for store, losses in zip(stores, measured, strict=True):
        documents: dict[int, list[LossPart]] = {}
        for part in losses.parts:
            documents.setdefault(part.document, []).append(part)
        ends = np.cumsum(np.asarray(store.lengths, np.int64))
        for number, parts in documents.items():
            ids = store.ids[ends[number] - int(store.lengths[number]) : ends[number]].tolist()
            text = tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.eos_id] else ids)
            yield {
                "id": hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16],
                "loss": sum(part.loss for part in parts),
                "tokens": sum(part.tokens for part in parts),
                "start": text[:SHOWN_START],
            }


def _measure_answers(scorer: NextTokenScorer, tokens: SplitTokens, window: int, split: str) -> Measured:
    """Loss and accuracy of the assistant's tokens: what the user says is given, the model need not predict it."""
    store_losses = [scorer.sum_answer_losses(store, length=window) for store in tokens.stores]
    predicted = sum(measured.tokens for measured in store_losses)
    if not predicted:
        raise TextmillError(
            f"{tokens.stores[0].prefix.parent}: the {split} split has no assistant tokens in windows of "
            f"{window} tokens; raise train.length, or measure another split (evaluate.split)"
        )
    loss = sum(measured.loss for measured in store_losses)
    correct = sum(measured.correct for measured in store_losses)
    metrics = compute_metrics(loss, {"tokens": predicted}, str(scorer.checkpoint.folder))
    card = {
        "split": split,
        "conversations": tokens.counts["documents"],
        "assistant_tokens": predicted,
        "window": window,
        "truncate": "start",
    }
    return Measured({**metrics, "accuracy": correct / predicted}, card, token_loss=metrics["loss"])


def _measure_baselines(
    tokens: SplitTokens, first: int, answers_only: bool = False
) -> tuple[dict[str, float | None], str]:
    """The metrics of a unigram and a bigram model, and how they were counted on the train split; `first` is the token
    before the first one."""
    ngrams = count(*tokens.train, vocab=tokens.vocab, first=first, answers_only=answers_only)
    losses = sum_losses(ngrams, *tokens.stores, first=first, answers_only=answers_only)
    counts = {"tokens": _count_answers(tokens.stores)} if answers_only else tokens.counts
    found: dict[str, float | None] = {}
    for name, loss in losses.items():
        metrics = compute_metrics(loss, counts, f"the {name}")
        found |= {f"{key}/{name}": metrics[key] for key in BASELINE_METRICS if key in metrics}
    train_tokens = _count_answers(tokens.train) if answers_only else sum(store.tokens for store in tokens.train)
    return found, f"{SMOOTHING}; counted on {ngrams.counted:,} of {train_tokens:,} train tokens"


def _count_answers(stores: list[TokenStore]) -> int:
    return sum(int(np.count_nonzero(store.loss_mask)) for store in stores if store.loss_mask is not None)


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
