"""Multiple choice: items with several candidates, the likelihood of each, and the accuracies made from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError, warn
from textmill.evaluation.data_files import DataFile, Record, open_data_file, read_items, sample, sample_card
from textmill.evaluation.metrics import proportion_interval
from textmill.evaluation.task import Measured, Pair, Score, Scorer, TaskEntry

LABELS = "ABCDEFGHIJ"
PROMPT_LABELS = re.compile(r"\b(Question|Answer|질문|답변|문장\d?|긍부정):")
"""What prompts add to the texts of the data."""


PSEUDO = "scores are pseudo-log-likelihoods: each token is masked in turn and predicted from all others"


@dataclass(frozen=True)
class Item:
    """One question: the model's answer is the candidate with the highest likelihood.

    "The capital of Peru is" with Lima and Quito: pairs (("The capital of Peru is", " Lima"), ("The capital of Peru is",
    " Quito")), texts ("Lima", "Quito"), answer 0.
    """

    pairs: tuple[tuple[str, str], ...]
    """Context and continuation of each candidate."""
    texts: tuple[str, ...]
    """The candidates without the space before them; their lengths normalise the likelihoods."""
    answer: int
    """The number of the right one."""
    place: str
    """Where it is in the file."""


ReadItem = Callable[[Record, str], Item]
"""From a record and its place to an item."""


def choice_item(context: str, choices: Iterable[Any], answer: Any, place: str, delimiter: str = " ") -> Item:
    """An item whose candidates follow one context; the answer is a number, a letter, or one of the candidates."""
    texts = tuple(choices)
    if len(texts) < 2:
        raise TextmillError(f"{place}: has {len(texts)} choices; a question needs two or more")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str) or not text.strip():
            raise TextmillError(f"{place}: choice {number} of {len(texts)} is empty; give every choice a text")
    return Item(tuple((context, delimiter + text) for text in texts), texts, _answer(answer, texts, place), place)


def _answer(answer: Any, texts: tuple[str, ...], place: str) -> int:
    number: int | None = None
    if isinstance(answer, int) or (isinstance(answer, str) and answer.strip().isdecimal()):
        number = int(answer)
    elif isinstance(answer, str) and answer in texts:
        number = texts.index(answer)
    elif isinstance(answer, str) and len(answer) == 1 and answer in LABELS:
        number = LABELS.index(answer)
    if number is None or not 0 <= number < len(texts):
        raise TextmillError(
            f"{place}: the answer is {answer!r}; give a number from 0 to {len(texts) - 1}, a letter, or one of the "
            "choices"
        )
    return number


def measure_choices(
    scorer: Scorer,
    settings: EvaluateConfig,
    entry: TaskEntry,
    read: ReadItem,
    protocol: str,
    data: DataFile | None = None,
) -> Measured:
    """Read a file of items with `read`, score all candidates, and count the right answers."""
    data = data or open_data_file(entry)
    every = [read(record, place) for place, record in read_items(data.path)]
    if not every:
        raise TextmillError(f"{data.path}: has no items; is it the right file?")
    items = sample(every, settings)
    pairs = [pair for item in items for pair in item.pairs]
    encoded = scorer.encode_pairs(pairs)
    truncated = check_lengths(encoded, [item.place for item in items for _ in item.pairs], scorer)
    scores = scorer.score_tokens(encoded)
    metrics, intervals = accuracies(items, scores)
    if scorer.objective == "masked":
        metrics["pseudo_bits_per_byte"] = metrics.pop("bits_per_byte")
        protocol += f"; {PSEUDO}"
    card = {
        **data.card,
        "protocol": protocol,
        **sample_card(len(items), len(every)),
        "candidates": len(pairs),
        "normalisation": "acc: none; acc_norm: characters; acc_bytes: UTF-8 bytes",
        "interval": "95%, Wilson",
        "truncated_contexts": truncated,
    }
    loss = -sum(score.log_likelihood for score in scores) / sum(score.tokens for score in scores)
    return Measured(metrics, card, intervals, loss)


def accuracies(
    items: list[Item], scores: list[Score]
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """The fraction of right answers by each normalisation, and the bits per byte of the right answer.

    Of candidates with equal scores the first counts, as in lm-evaluation-harness.
    """
    right = {"acc": 0, "acc_norm": 0, "acc_bytes": 0}
    answer_loss = 0.0
    answer_bytes = 0
    chance = 0.0
    begin = 0
    for item in items:
        item_scores = scores[begin : begin + len(item.pairs)]
        begin += len(item_scores)
        log_likelihoods = np.array([score.log_likelihood for score in item_scores])
        characters = np.array([len(text) for text in item.texts])
        byte_counts = np.array([len(text.encode()) for text in item.texts])
        right["acc"] += int(log_likelihoods.argmax() == item.answer)
        right["acc_norm"] += int((log_likelihoods / characters).argmax() == item.answer)
        right["acc_bytes"] += int((log_likelihoods / byte_counts).argmax() == item.answer)
        answer_loss -= item_scores[item.answer].log_likelihood
        answer_bytes += len(item.pairs[item.answer][1].strip().encode())
        chance += 1 / len(item.pairs)
    metrics: dict[str, float | None] = {name: count / len(items) for name, count in right.items()}
    metrics |= {"chance": chance / len(items), "bits_per_byte": answer_loss / math.log(2) / answer_bytes}
    return metrics, {name: proportion_interval(count, len(items)) for name, count in right.items()}


def check_lengths(encoded: list[Pair], places: list[str], scorer: Scorer) -> int:
    """Refuse a continuation without tokens or longer than the model's positions, with its place; count and report the
    contexts that lose their first tokens."""
    truncated = 0
    for place, (context, continuation) in zip(places, encoded, strict=True):
        if not 0 < len(continuation) <= scorer.positions:
            raise TextmillError(
                f"{place}: a continuation has {len(continuation):,} tokens; the model scores from 1 to "
                f"{scorer.positions:,}"
            )
        truncated += len(context) + len(continuation) > scorer.positions + 1
    if truncated:
        warn(
            f"{truncated:,} of {len(encoded):,} contexts are longer than the model's {scorer.positions:,} positions: "
            "their first tokens are left out"
        )
    return truncated


def texts_of(item: Item) -> list[str]:
    """The context of an item alone and with each candidate, without the labels of the prompt."""
    texts = [text for context, continuation in item.pairs for text in (context, context + continuation)]
    return [PROMPT_LABELS.sub(" ", text) for text in dict.fromkeys(texts)]
