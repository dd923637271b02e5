"""A task made from one function: adds the protocol card, the table and warnings.

The protocol card is a dictionary of everything that a reader must know to compare a number with another: the file and
its checksum, the prompt, the window, the normalisation, the precision.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from textmill.config import EvaluateConfig, RunConfig
from textmill.config.load import first_mistake, merge_trees
from textmill.errors import TextmillError, warn
from textmill.evaluation.data_files import name_of_texts
from textmill.evaluation.metrics import check_finite, format_number
from textmill.evaluation.split_tokens import open_tokens
from textmill.evaluation.task import ItemLog, Measured, Result, Scorer, TaskEntry
from textmill.storage.files import format_path, hash_json, read_json
from textmill.storage.progress import format_duration
from textmill.storage.stages import MANIFEST


@dataclass(frozen=True)
class MeasuredTask:
    """One entry of `evaluate.tasks`, measured by the function of its file."""

    entry: TaskEntry
    function: Callable[[Any, EvaluateConfig, TaskEntry], Measured]
    objectives: tuple[str, ...] = ("next_token",)
    """The models that it can measure, by what they predict."""
    takes_shots: bool = False
    """Whether `evaluate.shots` puts examples into its prompts."""
    read: Callable[[EvaluateConfig, TaskEntry], Any] | None = None
    """Reads all of its data without a model."""

    find_windows: Callable[[EvaluateConfig, int, int | None], Any] | None = None
    """Finds its windows in a model of so many positions that is trained with so many."""

    def check(self, settings: EvaluateConfig, positions: int, length: int | None) -> None:
        """Refuse settings and data that a model of so many positions cannot be measured with, before there is one."""
        settings = self._with_overrides(settings)
        if self.find_windows is not None:
            self.find_windows(settings, positions, length)
        if self.read is not None:
            self.read(settings, self.entry)

    def measure(self, scorer: Scorer, config: RunConfig) -> tuple[Result, list[ItemLog]]:
        """The metrics of the task under its label, with their intervals and the protocol card; and its per-item log."""
        check_objective(self, scorer.objective, scorer.checkpoint.folder)
        start = time.monotonic()
        settings = self._with_overrides(config.evaluate)
        if settings.shots and not self.takes_shots:
            warn(f"evaluate.shots: {self.entry.name} has no examples in its prompts; it is ignored there")
        opener = partial(open_tokens, scorer, config.model_copy(update={"evaluate": settings}))
        measured = self.function(scorer, settings, replace(self.entry, open_tokens=opener))
        warn_if_untrained(scorer, measured.token_loss)
        training_data = {}
        if "sha256" in measured.card:  # not for a task that reads no file
            is_own = scorer.checkpoint.folder.parent.resolve() == config.folder_of("train").resolve()
            training_data["training_data"] = UNKNOWN
            if is_own and not config.tokens.use:
                training_data["training_data"] = describe_corpus(
                    config.folder_of("corpus"),
                    config.folder_of("tokens"),
                    measured.card["sha256"],
                    scorer.checkpoint.progress,
                )
        seconds = {"seconds": time.monotonic() - start}
        code = {"code_sha256": self.entry.code.sha256} if self.entry.code else {}
        card = {"task": self.entry.name, **code, **measured.card, **training_data, **model_card(scorer), **seconds}
        intervals = {name: list(ends) for name, ends in measured.intervals.items()}
        for value in measured.metrics.values():
            check_finite(0.0 if value is None else value, str(scorer.checkpoint.folder))
        items = [{"task": self.entry.label, **item} for item in measured.items]
        return {self.entry.label: {**measured.metrics, "intervals": intervals, "card": card}}, items

    def _with_overrides(self, settings: EvaluateConfig) -> EvaluateConfig:
        """The settings with those of the user's task file."""
        overrides = self.entry.options.get("evaluate")
        if overrides is None:
            return settings
        try:
            if not isinstance(overrides, dict) or "tasks" in overrides:
                raise TextmillError("evaluate: give settings such as {stride: 512}, without tasks")
            return EvaluateConfig.model_validate(merge_trees(settings.model_dump(), overrides))
        except ValidationError as error:
            message = first_mistake(error, {"evaluate": overrides})[0]
        except TextmillError as error:
            message = str(error)
        raise TextmillError(f"task {self.entry.label}: {message}")

    def result_name(self, result: Result) -> str:
        """The label of its entry, what was measured, and a checksum of the protocol."""
        card = result[self.entry.label]["card"]
        return "-".join([self.entry.label, *name_data(card), hash_facts(card)])


NOT_PROTOCOL = ("file", "text", "seconds", "device", "training_data", "truncated_contexts", "ties", "baselines")
"""What a card says about a place, a machine or an outcome: it does not change what is measured."""


def name_data(card: dict[str, Any]) -> list[str]:
    """What was measured, as parts of a file name: the hash of the file, the texts or the split, and the sample."""
    parts = []
    if card.get("text"):
        parts.append(name_of_texts(card["text"]))
    elif "split" in card:
        parts.append(card["split"])
    if "sha256" in card:
        parts.append(card["sha256"][:8])
    if sampled := card.get("sample", card["examples"] if "of" in card else None):
        parts.append(f"sample{sampled}")
    return parts


def hash_facts(card: dict[str, Any]) -> str:
    """A short checksum of a protocol card: two measurements with the same one replace each other."""
    return hash_json({key: value for key, value in card.items() if key not in NOT_PROTOCOL})[:6]


def format_metrics(label: str, result: Result) -> str:
    """The metrics of a task's result, a line each, under its label:

    lambada
      accuracy    32.6%  (31.3% to 33.9%)
    """
    names = [name for name in result if name not in ("intervals", "card")]
    if not names:
        return label
    width = max(map(len, names))
    lines = [label]
    numbers = {name: format_number(name, result[name]) for name in names}
    number_width = max(map(len, numbers.values()))
    for name in names:
        line = f"  {name.ljust(width)}  {numbers[name].rjust(number_width)}"
        if (interval := result["intervals"].get(name)) is not None:
            low, high = (format_number(name, end) for end in interval)
            line += f"  ({low} to {high})"
        lines.append(line)
    return "\n".join(lines)


def check_objective(task: MeasuredTask, objective: str, model: Path | str) -> None:
    """Refuse a task that a model cannot do because of what it predicts; `model` is its name in the error."""
    if objective in task.objectives:
        return
    name = task.entry.name
    is_masked = objective == "masked"
    predicts = "masked tokens, not the next one" if is_masked else "the next token, not masked ones"
    advice = "pseudo_perplexity, pairs:FILE or choices:FILE" if is_masked else "perplexity"
    raise TextmillError(f"{model}: predicts {predicts}, so it has no {name}; use evaluate.tasks={advice}")


def model_card(scorer: Scorer) -> dict[str, Any]:
    """What the protocol card says about the model; its checkpoint and step are next to the card."""
    tokenizer = scorer.tokenizer
    first: dict[str, str] = {}
    if scorer.objective == "next_token":
        first["first_context"] = str(tokenizer.inner.id_to_token(tokenizer.first_id))
        if tokenizer.adds_bos:
            first["begin_token"] = "before every text, as the tokenizer adds it"
    return {
        **first,
        "tokenizer": tokenizer.fingerprint[:12],
        "vocabulary": tokenizer.vocab,
        "positions": scorer.positions,
        "precision": scorer.precision,
        "device": scorer.device,
    }


def format_card(card: dict[str, Any]) -> str:
    """A protocol card as aligned lines."""
    width = max(map(len, card))
    return "\n".join(f"{key.ljust(width)}  {_format_fact(key, value)}" for key, value in card.items())


def _format_fact(key: str, value: Any) -> str:
    if key == "seconds":
        return format_duration(value)
    if key == "file":
        return format_path(Path(value))
    if key == "text":
        return ", ".join(value)
    if key in ("sha256", "code_sha256"):
        return f"{value[:12]}..."
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and key != "seed" else str(value)


UNTRAINED = 0.97
"""A mean loss above this fraction of log(vocabulary), the loss of guessing, is suspicious."""


def warn_if_untrained(scorer: Scorer, token_loss: float | None) -> None:
    """Warn if the model is no better than guessing among all tokens."""
    guessing = math.log(scorer.vocab)
    if token_loss is not None and token_loss > UNTRAINED * guessing:
        warn(
            f"{format_path(scorer.checkpoint.folder)}: its loss is {token_loss:.2f} per token, guessing among "
            f"{scorer.vocab:,} tokens has {guessing:.2f}; the weights look untrained, or the tokenizer is not the one "
            "that they were trained with"
        )


def warn_if_foreign_tokenizer(scorer: Scorer, end: int) -> None:
    """Warn if the end-of-text token or the size of the tokenizer does not fit the model's config.json."""
    tokenizer = scorer.tokenizer
    folder = format_path(scorer.checkpoint.folder)
    named = tokenizer.model_ids.get("eos_token_id")
    if end < scorer.vocab and tokenizer.eos_id not in (named if isinstance(named, list) else [end]):
        warn(
            f"{folder}: config.json has {end} as end-of-text token, its tokenizer {tokenizer.eos_id}; check that the "
            "tokenizer belongs to the model"
        )
    elif tokenizer.vocab < 0.9 * scorer.vocab:
        warn(
            f"{folder}: its tokenizer has {tokenizer.vocab:,} entries, the model {scorer.vocab:,}; check that the "
            "tokenizer belongs to the model"
        )


UNKNOWN = "unknown: there is no corpus next to the model"
REBUILT = "unknown: corpus or tokens were made again after training"


def describe_corpus(folder: Path, tokens: Path, sha256: str, progress: dict[str, Any]) -> str:
    """Whether the corpus in a folder was checked for a file, if it is the one of a checkpoint's `progress`."""
    try:
        made = read_json(tokens / MANIFEST) if (tokens / MANIFEST).is_file() else {}
        trained_on = progress["made_from"]["tokens"] == made["fingerprint"] and made["made_from"]["corpus"]
        manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
        checked = {one["sha256"]: one["file"] for one in manifest["made_from"].get("corpus.decontaminate", [])}
        account = read_json(folder / "account.json").get("contamination", {}) if sha256 in checked else {}
    except (TextmillError, KeyError, TypeError, AttributeError):
        return UNKNOWN
    if trained_on != manifest.get("fingerprint"):
        return REBUILT
    if sha256 not in checked:
        return "not checked for this file: corpus.decontaminate does not name it"
    found = account.get(checked[sha256], {})
    count = found.get("documents", 0)
    return f"checked for this file: {count:,} {'document' if count == 1 else 'documents'} dropped"
