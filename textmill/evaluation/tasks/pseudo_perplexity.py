"""Pseudo-perplexity of a model for masked tokens (Salazar et al. 2020): each token is masked in turn and predicted from
all others. It is not a perplexity: the model sees both sides of a token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import PSEUDO
from textmill.evaluation.data_files import kind_of, open_data_file, read_items, read_lines, sample, sample_card, text_of
from textmill.evaluation.metrics import document_interval, perplexity_of, transform
from textmill.evaluation.split_tokens import SplitTokens
from textmill.evaluation.task import LossPart, Measured, Scorer, TaskEntry

OBJECTIVES = ("masked",)
FILE_OPTIONAL = True
"""Without a file it measures `evaluate.text` or a split."""
FILES = 'none: a split of the run, or evaluate.text; or any .txt file, or your own lines of {"text": ...}'
Ids = NDArray[Any]


def measure(scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
    """The texts of a file (lines, or the field "text" of records), or those of `evaluate.text` or a split."""
    if entry.file is not None:
        data = open_data_file(entry)
        every = [text for text in _read(entry) if text.strip()]
        texts = sample(every, settings)
        encoded = [ids for _, ids in scorer.encode_pairs([("", text) for text in texts])]
        octets = sum(len(text.encode()) for text in texts)
        card = {**data.card, **sample_card(len(texts), len(every))}
        return _measure(scorer, [np.array(ids, np.int64) for ids in encoded], card, octets)
    with entry.open_tokens() as tokens:
        sequences = [ids for ids in _sequences(tokens, scorer.tokenizer.eos_id) if len(ids)]
        chosen = sample(sequences, settings)
        octets = tokens.counts.get("bytes", 0) if len(chosen) == len(sequences) else 0
        origin = {"text": list(settings.text)} if settings.text else {"split": settings.split}
        card = {**origin, **sample_card(len(chosen), len(sequences))}
        return _measure(scorer, chosen, card, octets)


def read_texts(entry: TaskEntry) -> Iterator[list[str]]:
    """Each text alone."""
    return ([text] for text in _read(entry))


def _read(entry: TaskEntry) -> Iterator[str]:
    for path in open_data_file(entry).files:
        if kind_of(path) == ".txt":
            yield from (line.rstrip("\r\n") for _, line in read_lines(path))
        else:
            yield from (text_of(record, "text", place) for place, record in read_items(path))


def _sequences(tokens: SplitTokens, end: int) -> Iterator[Ids]:
    """Each sentence of a sentence-level store, or else each document, without its end-of-text token; not copied."""
    for store in tokens.stores:
        ends = np.cumsum(np.asarray(store.lengths, np.int64))
        for start, stop in zip((ends - store.lengths).tolist(), ends.tolist(), strict=True):
            ids = store.ids[start:stop]
            yield ids[:-1] if len(ids) and ids[-1] == end else ids


def _measure(scorer: Scorer, texts: list[Ids], card: dict[str, Any], octets: int) -> Measured:
    """Score every token once; a text that is longer than the model is divided into pieces."""
    longest = scorer.positions
    starts = [(number, begin) for number, ids in enumerate(texts) for begin in range(0, len(ids), longest)]
    pieces = [texts[number][begin : begin + longest] for number, begin in starts]
    if not pieces:
        raise TextmillError(f"{card.get('file') or 'the text'}: has no token to predict; give it more text")
    scores = scorer.score_tokens([((), piece) for piece in pieces])  # type: ignore[misc]
    parts = [
        LossPart(number, -score.log_likelihood, score.tokens) for (number, _), score in zip(starts, scores, strict=True)
    ]
    tokens = sum(part.tokens for part in parts)
    loss = sum(part.loss for part in parts) / tokens
    metrics: dict[str, float | None] = {"pseudo_loss": loss, "pseudo_perplexity": perplexity_of(loss, 1)}
    interval, interval_method = document_interval(parts)
    intervals = {"pseudo_loss": interval, "pseudo_perplexity": transform(interval, lambda mean: perplexity_of(mean, 1))}
    if octets:
        per_byte = tokens / octets / math.log(2)
        metrics["pseudo_bits_per_byte"] = loss * per_byte
        intervals["pseudo_bits_per_byte"] = transform(interval, lambda mean: mean * per_byte)
    card |= {
        "protocol": PSEUDO,
        "tokens": tokens,
        "pieces": len(pieces),
        "interval": interval_method,
        "special_tokens": "[CLS] and [SEP] are not scored",
    }
    return Measured(metrics, card, {name: ends for name, ends in intervals.items() if ends is not None}, loss)
