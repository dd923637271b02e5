"""Run the trials of `textmill tune` and keep their results: a finished trial is never run twice."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import find_checkpoint
from textmill.config import ModelConfig, RunConfig, ShapeConfig, shape_numbers
from textmill.config.load import build_config, drop_replaced, merge_trees, parse_settings
from textmill.config.own_files import is_own_file, open_own_file
from textmill.errors import Interrupted, TextmillError
from textmill.evaluation.metrics import compute_metrics
from textmill.planning.trials import (
    MIN_STEPS,
    Changes,
    Lengths,
    Outcome,
    Result,
    Trial,
    needed_minutes,
    search,
    trial_minutes,
)
from textmill.processes.launch import read_launch
from textmill.storage.files import hash_json, read_json, remove_folder, write_json
from textmill.storage.stages import list_changes, open_manifest
from textmill.tokens.batches.blend import BatchSizes
from textmill.tokens.splits import Splits
from textmill.track.jsonl import METRICS_FILE, read_metrics
from textmill.training.generations import split_generations
from textmill.training.loop import train
from textmill.training.run_length import plan_run_length
from textmill.training.start import own_parts
from textmill.training.validation import EVERY_TOKEN

FOLDER = "tune"
TRIALS_FILE = "trials.json"
NEVER = 1_000_000_000
"""Steps between two saves of a trial: only its end is saved and evaluated."""
Report = Callable[[int, Trial, Result, Outcome], None]


class _OutOfMinutes(Exception):
    """The next trial would not fit in the minutes."""


@dataclass
class Tuning:
    """All trials of a project."""

    config: RunConfig
    data: Splits
    minutes: float
    started: float
    """When the command started, as `time.monotonic` counts."""
    outcome: Outcome = field(default_factory=Outcome)
    trials: list[tuple[Trial, Result]] = field(default_factory=list)
    is_warm: bool = False
    """Whether this process has loaded and compiled what all trials use."""

    @property
    def folder(self) -> Path:
        """Where results and trials are kept."""
        return Path(self.config.folder) / FOLDER

    def run(self, report: Report) -> bool:
        """Run trials as long as they fit in the minutes; `report` is called after each, also after those that an
        earlier call finished. True: every setting was tried."""
        stored = self._stored()
        made_from = self._made_from()
        if stored and (changes := list_changes(stored["made_from"], made_from)):
            raise TextmillError(
                f"{self.folder / TRIALS_FILE}: its trials had other settings ({'; '.join(changes)}); "
                "restore them, or start again with --force"
            )
        full_minutes = split_generations(self.config)[0].train.minutes  # a trial is one generation
        minutes = stored["trial_minutes"] if stored else trial_minutes(self.minutes, full_minutes)
        finished = {_key(row): Result(**row["result"]) for row in stored["trials"]} if stored else {}
        earlier_seconds = sum(result.seconds for result in finished.values())
        lengths = Lengths(minutes, self._full_steps(), full_minutes)

        def settle() -> None:
            """Keep and report the last trial, after the search has compared it."""
            if self.trials:
                trial, result = self.trials[-1]
                if _key(asdict(trial)) not in finished:
                    self._store(made_from, minutes)
                report(len(self.trials), trial, result, self.outcome)

        def run(trial: Trial) -> Result:
            settle()
            result = finished.get(_key(asdict(trial)))
            if result is None:
                spent_seconds = earlier_seconds + time.monotonic() - self.started
                if self.trials and spent_seconds + self._longest() > 60 * self.minutes:
                    raise _OutOfMinutes
                if not self.is_warm:
                    self._warm_up()
                result = self._run_trial(len(self.trials) + 1, trial)
            self.trials.append((trial, result))
            return result

        averages = "train.ema_window" not in self.config.engine.refused
        try:
            search(self.config.train, net_numbers(self.config.model), averages, lengths, self.outcome, run)
        except _OutOfMinutes:
            return False
        if self.outcome.too_short:
            self._refuse_short_trials(lengths, self.trials[0][1])
        settle()
        return True

    def _refuse_short_trials(self, lengths: Lengths, first: Result) -> None:
        """Nothing is stored, so that the next call chooses another length."""
        raise TextmillError(
            f"--minutes: {self.minutes:g} minutes give trials of {first.steps} steps, and fewer than {MIN_STEPS} do "
            "not show which setting is better; give --minutes "
            f"{math.ceil(needed_minutes(lengths, first))} or more"
        )

    def _longest(self) -> float:
        """Seconds of the longest trial so far."""
        return max(result.seconds for _, result in self.trials)

    def _warm_up(self) -> None:
        """Load and compile what all trials use, so that the first one does not lose time with it."""
        self.is_warm = True
        run = self.folder / "trial-warm-up"
        remove_folder(run)
        self._train(run, {"train.steps": 1})
        remove_folder(run)

    def _train(self, run: Path, changes: Changes) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        intervals = {"train.evaluate_every": NEVER, "train.save_every": NEVER}
        own = {"train.folder": str(run), "train.generations": 1}
        config = change_settings(self.config, {**changes, **own, **intervals})
        with open(f"{run}.log", "a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            train(config)

    def _run_trial(self, number: int, trial: Trial) -> Result:
        run = self.folder / f"trial-{number:02d}"
        start = time.monotonic()
        try:
            self._train(run, {**trial.changes, **trial.length})
            found = find_checkpoint(run)
            if found is None or found.valid_loss is None:
                raise TextmillError(f"{run}: the trial has no valid loss")
        except Interrupted:
            raise
        except TextmillError as error:
            if number == 1:
                raise
            return Result(None, 0, time.monotonic() - start, str(error))
        loss = self._in_bits(found.valid_loss)
        step_seconds = self._step_seconds(run)
        remove_folder(run)  # the result is what remains of a trial, and its log
        return Result(loss, found.step, time.monotonic() - start, step_seconds=step_seconds)

    def _step_seconds(self, run: Path) -> float:
        """Seconds of the last steps of a run with the batch of the project; 0: it did not log them."""
        settings = self.config.train
        speeds = [row["tokens_per_second"] for row in read_metrics(run / METRICS_FILE) if row.get("tokens_per_second")]
        return settings.batch * (settings.length or 1024) / speeds[-1] if speeds else 0.0

    @property
    def unit(self) -> str:
        """What losses are in: bits per byte, or nats per token where bytes are not known."""
        return "bits per byte" if self._valid_counts() else "nats per token"

    def _valid_counts(self) -> dict[str, int] | None:
        if self.config.tokens.use or self.config.train.layout not in EVERY_TOKEN:
            return None
        counts: dict[str, int] = open_manifest(self.config.folder_of("tokens"), "tokenize")["splits"]["valid"]
        return counts if counts.get("bytes") else None

    def _in_bits(self, loss: float) -> float:
        if (counts := self._valid_counts()) is None:
            return loss
        bits = compute_metrics(loss * counts["tokens"], counts, "a trial")["bits_per_byte"]
        assert bits is not None
        return bits

    def _full_steps(self) -> int | None:
        """About the steps of the entire run, if its length is not set in minutes."""
        settings = self.config.train
        if settings.minutes is not None:
            return None
        length = settings.length or 1024
        samples = max(1, sum(store.tokens for store in self.data.stores("train")) // length)
        return plan_run_length(settings, BatchSizes(settings.batch, settings.batch_rampup), samples, length).steps

    def _made_from(self) -> dict[str, Any]:
        settings = self.config.train
        results = self.config.results("model", "train")
        results.pop("train.folder", None)
        size = {f"train.{settings.unit}": getattr(settings, settings.unit)}
        tokens = {split: sum(store.tokens for store in self.data.stores(split)) for split in ("train", "valid")}
        results |= {key: file.described for key, file in own_parts(settings).items()}
        if is_own_file(family := self.config.model.family):
            results["model.family"] = open_own_file(family, "model.family").described
        return {**results, **size, "tokens": tokens, "tokenizer": self.data.tokenizer.fingerprint}

    def _stored(self) -> dict[str, Any] | None:
        path = self.folder / TRIALS_FILE
        return read_json(path) if path.is_file() else None

    def summary(self) -> dict[str, Any]:
        """All results as plain values."""
        outcome = asdict(self.outcome)
        rows = [{**asdict(trial), "result": asdict(result)} for trial, result in self.trials]
        return {"unit": self.unit, "best": outcome, "trials": rows}

    def _store(self, made_from: dict[str, Any], minutes: float) -> None:
        write_json(self.folder / TRIALS_FILE, {"made_from": made_from, "trial_minutes": minutes, **self.summary()})


def _key(row: dict[str, Any]) -> str:
    """What a trial changes: another version may search in another order, so a result is not found by its number."""
    return hash_json([row["setting"], row["changes"], row["length"]])


def change_settings(config: RunConfig, changes: Changes) -> RunConfig:
    """The config with other values of some keys, checked."""
    overrides = parse_settings(changes)
    tree = config.model_dump(mode="json", exclude_unset=True)
    return build_config(merge_trees(drop_replaced(tree, overrides), overrides))


def net_numbers(model: ModelConfig) -> dict[str, Any]:
    """The numbers of the net that trials change: all of them, or only the dropout if weights or a file fix its
    shape."""
    if model.init_from or isinstance(model.shape, str) or is_own_file(model.family):
        dropout = model.shape.dropout if isinstance(model.shape, ShapeConfig) else None
        return {"dropout": dropout or 0.0}
    return shape_numbers(model)


def refuse_several_processes() -> None:
    """Trials run one after the other in one process."""
    if (launch := read_launch(os.environ)) and launch.world > 1:
        raise TextmillError(f"tune: found {launch.world} processes; start it without a launcher")
