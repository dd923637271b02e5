"""Multiple choice: items with several candidates, the likelihood of each, and the accuracies made from them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import EvaluateConfig
from textmill.errors import TextmillError, warn
from textmill.evaluation.data_files import Record, open_data_file, read_items, sample, sample_card, stem_of
from textmill.evaluation.examples import Examples, ReadRecords, choose_examples
from textmill.evaluation.metrics import proportion_interval
from textmill.evaluation.task import ItemLog, Measured, Pair, Score, Scorer, TaskEntry

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
    group: str = ""
    """The part of the data that it belongs to, such as a subject: each has an accuracy of its own."""
    prefix: str = ""
    """What stands before every context: a description of the task, and examples."""
    id: str = ""
    """Its place without the folder of the file: the same on every machine."""

    @property
    def solved(self) -> str:
        """The question with its right answer, as an example for other questions."""
        return "".join(self.pairs[self.answer])


ReadItem = Callable[[Record, str], Item]
"""From a record and its place to an item."""


@dataclass(frozen=True)
class ChoiceTask:
    """A task of multiple choice: a file in tasks/ that has one as `TASK` needs no other code."""

    read_item: ReadItem
    protocol: str
    """What the card says about the prompt."""
    examples: Examples = field(default_factory=Examples)
    """For its prompts."""
    read_records: ReadRecords = read_items
    objectives: tuple[str, ...] = ("next_token",)
    """The models that it can measure, by what they predict."""

    def measure(self, scorer: Scorer, settings: EvaluateConfig, entry: TaskEntry) -> Measured:
        """Read the items of all files, score all candidates, and count the right answers."""
        return measure_items(scorer, *self.read(settings, entry))

    def read(self, settings: EvaluateConfig, entry: TaskEntry) -> tuple[list[Item], dict[str, Any]]:
        """The items of all files with their prompts, and what the card says about them."""
        data = open_data_file(entry)
        every: list[Item] = []
        card: dict[str, Any] = {}
        for path in data.files:
            records = list(self.read_records(path))
            shots = choose_examples(path, records, self.read_records, self.examples, settings)
            card = {**card, **shots.card}
            for (place, record), examples in zip(records, shots.by_record, strict=True):
                item = self.read_item(record, place)
                shown = "".join(f"{self.read_item(one, where).solved}\n\n" for where, one in examples)
                group = item.group or (stem_of(path) if len(data.files) > 1 else "")
                id_ = path.name + place.removeprefix(str(path))
                every.append(replace(item, prefix=item.prefix + shown, group=group, id=id_))
        if not every:
            raise TextmillError(f"{data.path}: has no items; is it the right file?")
        items = sample(every, settings)
        return items, {**data.card, "protocol": self.protocol, **card, **sample_card(len(items), len(every))}


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


def measure_items(scorer: Scorer, items: list[Item], card: dict[str, Any]) -> Measured:
    """Score all candidates of items and count the right answers, of all and of each group."""
    pairs = [(item.prefix + context, continuation) for item in items for context, continuation in item.pairs]
    encoded = scorer.encode_pairs(pairs)
    truncated = check_lengths(encoded, [item.place for item in items for _ in item.pairs], scorer)
    scores = scorer.score_tokens(encoded)
    logs = list(grade_items(items, scores))
    metrics, intervals = accuracies(items, logs)
    name = "bits_per_byte"
    if scorer.objective == "masked":
        name = "pseudo_bits_per_byte"
        card = {**card, "protocol": f"{card['protocol']}; {PSEUDO}"}
    answer_bytes = sum(len(item.pairs[item.answer][1].strip().encode()) for item in items)
    answer_loss = -sum(log["scores"][item.answer] for item, log in zip(items, logs, strict=True))
    metrics |= {"chance": float(np.mean([1 / len(item.pairs) for item in items]))}
    metrics |= {name: answer_loss / math.log(2) / answer_bytes}
    ties = sum(log["tied"] for log in logs)
    card |= {
        "candidates": len(pairs),
        "normalisation": "acc: none; acc_norm: characters; acc_bytes: UTF-8 bytes",
        "interval": "95%, Wilson",
        "truncated_contexts": truncated,
        **({"ties": f"{ties:,}; of k equal candidates each counts 1/k, in lm-eval the first counts"} if ties else {}),
    }
    loss = -sum(score.log_likelihood for score in scores) / sum(score.tokens for score in scores)
    return Measured(metrics, card, intervals, loss, logs)


def grade_items(items: list[Item], scores: list[Score]) -> Iterator[ItemLog]:
    """What the model answered to each item: the score of each candidate, and how right it is by each normalisation."""
    begin = 0
    for item in items:
        item_scores = scores[begin : begin + len(item.pairs)]
        begin += len(item_scores)
        log_likelihoods = np.array([score.log_likelihood for score in item_scores])
        characters = np.array([len(text) for text in item.texts])
        octets = np.array([len(text.encode()) for text in item.texts])
        yield {
            "id": item.id,
            **({"group": item.group} if item.group else {}),
            "context": item.pairs[item.answer][0],
            "choices": list(item.texts),
            "answer": item.answer,
            "prediction": int(log_likelihoods.argmax()),
            "scores": log_likelihoods.tolist(),
            "tokens": [score.tokens for score in item_scores],
            "tied": bool((log_likelihoods == log_likelihoods.max()).sum() > 1),
            "acc": credit(log_likelihoods, item.answer),
            "acc_norm": credit(log_likelihoods / characters, item.answer),
            "acc_bytes": credit(log_likelihoods / octets, item.answer),
        }


def credit(values: NDArray[np.float64], answer: int) -> float:
    """1 if the right candidate alone has the highest value, 1/k if it shares that with others, 0 otherwise.

    lm-evaluation-harness counts the first of equal candidates: in minimal pairs that is always the right one, so a
    model that finds all sentences equally likely would have 100%.
    """
    is_best = values == values.max()
    return float(is_best[answer] / is_best.sum())


def accuracies(
    items: list[Item], logs: list[ItemLog]
) -> tuple[dict[str, float | None], dict[str, tuple[float, float]]]:
    """The accuracy of all items by each normalisation, and the plain one of each group."""
    right = {name: [log[name] for log in logs] for name in ("acc", "acc_norm", "acc_bytes")}
    groups = sorted({item.group for item in items})
    if len(groups) > 1:
        for group in groups:
            right[f"acc/{group}"] = [log["acc"] for item, log in zip(items, logs, strict=True) if item.group == group]
    metrics: dict[str, float | None] = {name: sum(credits) / len(credits) for name, credits in right.items()}
    return metrics, {name: proportion_interval(sum(credits), len(credits)) for name, credits in right.items()}


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
