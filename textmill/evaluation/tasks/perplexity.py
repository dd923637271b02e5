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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.data_files import SAMPLE_SEED
from textmill.evaluation.measured_task import ITEMS, format_card, hash_facts, model_card, name_data, warn_if_untrained
from textmill.evaluation.metrics import (
    compute_metrics,
    document_interval,
    format_metrics,
    format_number,
    metric_intervals,
)
from textmill.evaluation.split_tokens import SplitTokens, open_tokens
from textmill.evaluation.task import ItemLog, LossPart, NextTokenScorer, Result, StoreLoss
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

FILES = "none: a split of the run, or evaluate.text"
PROTOCOL_KEYS = (
    *("split", "text", "sha256", "documents", "tokens", "window", "stride", "truncate"),
    *("append_end", "document_unit"),
)
"""What a result says about how it was measured, beside its card."""
FACTS = (*PROTOCOL_KEYS, "words", "bytes", "stores")
"""What is shown of them, and counts."""
SMOOTHING = "unigram: add-one; bigram: interpolated Witten-Bell over that unigram"
ROWS = ("model", "unigram", "bigram")
MAX_LOGGED = 200_000
"""Of more documents there is no log."""
SHOWN_START = 60
"""Characters of a document in the log."""


def measure(scorer: NextTokenScorer, config: RunConfig) -> Result:
    """Sum the loss of every token of a split or text and divide it by tokens, words and bytes."""
    start = time.monotonic()
    with open_tokens(scorer, config) as tokens:
        settings = config.evaluate
        window, stride = find_windows(settings, scorer.positions, config.train.length)
        is_chat = config.train.layout == "chat" and tokens.has_answers and not settings.text
        if is_chat:
            result = _measure_answers(scorer, tokens, window, settings.split)
        else:
            result = _measure_windows(scorer, settings, tokens, window, stride)
        with_baselines = settings.baselines and tokens.train
        baselines = _measure_baselines(tokens, scorer.tokenizer.first_id, is_chat) if with_baselines else {}
    warn_if_untrained(scorer, result["model"]["loss"])
    card = {**model_card(scorer), "seconds": time.monotonic() - start}
    return {**result, **baselines, "card": card}


def find_windows(settings: EvaluateConfig, positions: int, trained_length: int | None) -> tuple[int, int]:
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
) -> Result:
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
    intervals = metric_intervals(interval, counts)
    result: Result = {} if settings.text else {"split": settings.split}
    result |= {**counts, "window": window, "stride": stride}
    if settings.sample is not None:
        result["sample"] = {
            "windows": sum(measured.windows for measured in store_losses),
            "tokens": predicted,
            "seed": SAMPLE_SEED,
        }
    result |= {"precision": scorer.precision, "device": scorer.device, **tokens.facts}
    result["model"] = compute_metrics(mean_loss * counts["tokens"], counts, str(scorer.checkpoint.folder))
    result["intervals"] = {name: list(ends) for name, ends in intervals.items()}
    result["interval"] = interval_method
    if settings.sample is None and tokens.counts["documents"] <= MAX_LOGGED:
        result["model"][ITEMS] = list(_document_items(scorer.tokenizer, tokens.stores, store_losses))
    return result


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
                "task": "perplexity",
                "id": hashlib.sha256(text.encode(errors="replace")).hexdigest()[:16],
                "loss": sum(part.loss for part in parts),
                "tokens": sum(part.tokens for part in parts),
                "start": text[:SHOWN_START],
            }


def _measure_answers(scorer: NextTokenScorer, tokens: SplitTokens, window: int, split: str, truncate: str) -> Result:
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
    return {
        "split": split,
        "documents": tokens.counts["documents"],
        "tokens": predicted,
        "window": window,
        "truncate": "start",
        "precision": scorer.precision,
        "device": scorer.device,
        "model": {**metrics, "accuracy": correct / predicted},
    }


def format_table(result: Result) -> str:
    """A row for the model and for each baseline."""
    return format_metrics({row: result[row] for row in ROWS if row in result})


def describe_method(result: Result) -> str:
    """What was read and counted, and the rest of the protocol card."""
    facts = {key: result[key] for key in FACTS if key in result}
    if "text" in facts:
        facts["text"] = ", ".join(facts["text"])
    if sample := result.get("sample"):
        facts["sample"] = f"{sample['windows']:,} windows ({sample['tokens']:,} tokens), seed {sample['seed']}"
    if (interval := result.get("intervals", {}).get("token_perplexity")) is not None:
        low, high = (format_number("token_perplexity", end) for end in interval)
        facts["interval"] = f"token ppl {low} to {high}, {result['interval']}"
    if "counted" in result:
        facts["baselines"] = f"{SMOOTHING}; counted on {result['counted']:,} of {result['train_tokens']:,} train tokens"
    return format_card(facts | result["card"])


def result_name(result: Result) -> str:
    """The split or the text, the sample, and a checksum of the protocol."""
    facts = {key: value for key, value in result.items() if key in PROTOCOL_KEYS} | result["card"]
    if "sample" in result:
        facts |= {"sample": result["sample"]["windows"]}
    return "-".join(["perplexity", *name_data(facts), hash_facts(facts)])


def _measure_baselines(tokens: SplitTokens, first: int, answers_only: bool = False) -> Result:
    """A unigram and a bigram model, counted on the train split; `first` is the token before the first one."""
    ngrams = count(*tokens.train, vocab=tokens.vocab, first=first, answers_only=answers_only)
    losses = sum_losses(ngrams, *tokens.stores, first=first, answers_only=answers_only)
    counts = {"tokens": _count_answers(tokens.stores)} if answers_only else tokens.counts
    metrics = {name: compute_metrics(loss, counts, f"the {name}") for name, loss in losses.items()}
    train_tokens = _count_answers(tokens.train) if answers_only else sum(store.tokens for store in tokens.train)
    return {**metrics, "counted": ngrams.counted, "train_tokens": train_tokens}


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
