"""LAMBADA: predict the last word of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import check_lengths
from textmill.evaluation.data_files import open_data_file, read_items, sample, sample_card, text_of
from textmill.evaluation.metrics import mean_loss_interval, perplexity_of, proportion_interval, transform
from textmill.evaluation.task import Measured, Score, Scorer, TaskEntry

FILES = "lambada_test.jsonl"
SOURCE = "GPT-2's preprocessing of LAMBADA: https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl"


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """Lines of {"text": ...}; the last word after a space is predicted from all before it."""
    data = open_data_file(entry)
    every = [
        (place, *split_last_word(text_of(record, "text", place), place))
        for path in data.files
        for place, record in read_items(path)
    ]
    if not every:
        raise TextmillError(f"{data.path}: has no texts; is it the right file?")
    texts = sample(every, settings)
    encoded = scorer.encode_pairs([(context, word) for _, context, word in texts])
    truncated = check_lengths(encoded, [place for place, *_ in texts], scorer)
    scores = scorer.score_tokens(encoded)
    logs = [
        {
            "id": Path(place).name,
            "word": word,
            "score": score.log_likelihood,
            "accuracy": float(score.greedy),
            "last_token_accuracy": float(score.last_greedy),
        }
        for (place, _, word), score in zip(texts, scores, strict=True)
    ]
    card = {
        **data.card,
        "protocol": "last word of each text",
        **sample_card(len(texts), len(every)),
        "normalisation": "accuracy: every token of the last word is the likeliest; perplexity: per last word; "
        "last_token: only the text's last token, given all before it",
        "interval": "95%, Wilson; of perplexities from the mean loss",
        "truncated_contexts": truncated,
    }
    octets = sum(len(word.strip().encode()) for *_, word in texts)
    return replace(_measured(scores, octets, card), items=logs)


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """The texts, each an example."""
    for path in open_data_file(entry).files:
        for place, record in read_items(path):
            yield [text_of(record, "text", place)]


def _measured(scores: list[Score], octets: int, card: dict[str, object]) -> Measured:
    losses = np.array([-score.log_likelihood for score in scores])
    last = np.array([-score.last_log_likelihood for score in scores])
    right = sum(score.greedy for score in scores)
    right_last = sum(score.last_greedy for score in scores)
    metrics: dict[str, float | None] = {
        "accuracy": right / len(scores),
        "perplexity": _perplexity(losses.mean()),
        "last_token_accuracy": right_last / len(scores),
        "last_token_perplexity": _perplexity(last.mean()),
        "bits_per_byte": float(losses.sum()) / math.log(2) / octets,
    }
    ones = [1] * len(scores)
    found = {
        "accuracy": proportion_interval(right, len(scores)),
        "perplexity": transform(mean_loss_interval(losses.tolist(), ones), _perplexity),
        "last_token_accuracy": proportion_interval(right_last, len(scores)),
        "last_token_perplexity": transform(mean_loss_interval(last.tolist(), ones), _perplexity),
    }
    intervals = {name: interval for name, interval in found.items() if interval is not None}
    return Measured(metrics, card, intervals, float(losses.sum()) / sum(score.tokens for score in scores))


def _perplexity(loss: float) -> float | None:
    """Of a mean loss."""
    return perplexity_of(loss, 1)


def split_last_word(text: str, place: str) -> tuple[str, str]:
    """All but the last word, and the last word with the space before it."""
    context, space, word = text.rpartition(" ")
    if not space or not word.strip() or not context.strip():
        raise TextmillError(
            f"{place}: the text {text[-40:]!r} has no last word after a space; there is none to predict"
        )
    return context, f" {word}"
