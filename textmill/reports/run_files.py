"""RunFiles: what the files of a run folder say about the run; nothing is recorded for reports alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.best import VALID_LOSS, BestRule, read_metric
from textmill.checkpoints.folders import advise_training, list_checkpoints, read_best_values
from textmill.config import STAGE_FOLDERS
from textmill.config.load import build_config, read_yaml
from textmill.config.own_files import is_own_file
from textmill.errors import TextmillError
from textmill.models import read_shape
from textmill.processes.signals import STOPPED_FILE
from textmill.storage.files import format_path, read_json
from textmill.storage.stages import MANIFEST, PROJECT_YAML, RUN_YAML, open_manifest
from textmill.storage.tensor_files import count_model
from textmill.tokens.batches.blend import BatchSizes, sizes_of
from textmill.track.jsonl import METRICS_FILE, NOTES_FILE, read_metrics, read_notes
from textmill.training.changing import data_ranges
from textmill.training.run_folder import SAMPLES_FILE, SUMMARY_FILE

EVALUATIONS = "evaluation"
Point = tuple[int, float]


@dataclass(frozen=True)
class RunFiles:
    """One run, read from its folder."""

    folder: Path
    settings: dict[str, Any]
    """Every setting, flat: 'train.batch' -> value."""
    metrics: list[dict[str, Any]]
    """The lines of metrics.jsonl."""
    valid_losses: dict[int, float]
    """Valid losses of the checkpoints, by step."""
    progress: dict[str, Any] = field(default_factory=dict)
    """progress.json of the newest checkpoint."""
    parameters: int | None = None
    best_rule: BestRule = field(default_factory=BestRule)
    """The metric that chooses the best checkpoint."""
    best_values: dict[int, float] = field(default_factory=dict)
    """Its values in the checkpoints, by step."""

    @property
    def name(self) -> str:
        """A short name: the run folder, or its project if the folder is called `run`."""
        folder = self.folder.resolve()  # `report .` reads `run`
        return folder.parent.name if folder.name == STAGE_FOLDERS["train"] else folder.name

    @property
    def checkpoints(self) -> list[int]:
        """The steps that have a checkpoint."""
        return list(list_checkpoints(self.folder))

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint."""
        return self.best_rule.best_of(self.best_values)

    @property
    def task_metrics(self) -> list[str]:
        """The metrics of `train.tasks`, without their seconds, in the order in which they were logged."""
        names = dict.fromkeys(key for line in self.metrics for key in line if "/" in key)
        return [name for name in names if not name.endswith("/seconds")]

    @property
    def last_step(self) -> int:
        """The last step in the metrics or checkpoints."""
        return max([line["step"] for line in self.metrics] + self.checkpoints, default=0)

    @cached_property
    def planned_steps(self) -> int | None:
        """How many steps the run has in all; None if they are counted in epochs or minutes."""
        recorded = self.progress.get("run_length", {}).get("steps")
        if isinstance(recorded, int):
            return recorded
        if self.settings.get("train.epochs") is not None or self.settings.get("train.minutes") is not None:
            return None
        steps = self.settings.get("train.steps")
        return steps if isinstance(steps, int) else None

    def points(self, metric: str) -> list[Point]:
        """(step, value) of every logged step that has this metric as a number."""
        values = ((line["step"], line.get(metric)) for line in self.metrics)
        return [(step, float(value)) for step, value in values if isinstance(value, int | float)]

    def tokens_after(self, step: int) -> int:
        """Tokens of the first `step` steps; 0 if the length of a sample is not known."""
        return self._batch_sizes.samples_before(step) * self._sample_length

    @cached_property
    def _sample_length(self) -> int:
        return self.progress.get("made_from", {}).get("train.length") or self.settings.get("train.length") or 0

    @cached_property
    def _batch_sizes(self) -> BatchSizes:
        """With the batch sizes that `train --change` set in mid-run."""
        if ranges := self.progress.get("ranges"):
            return sizes_of(data_ranges(ranges))
        return BatchSizes(self.settings.get("train.batch", 1), self.settings.get("train.batch_rampup") or [])

    @property
    def changes(self) -> list[tuple[int, str]]:
        """(step, text) of the changes that `train --change` made in mid-run, after that step."""
        return [(line["step"], str(line["change"])) for line in self.metrics if "change" in line]

    @cached_property
    def seconds(self) -> list[Point]:
        """(step, seconds of training until then), computed from the logged throughput; without pauses."""
        total = 0.0
        tokens_before = 0
        points = []
        for step, tokens_per_second in self.points("tokens_per_second"):
            tokens = self.tokens_after(step)
            total += (tokens - tokens_before) / tokens_per_second if tokens_per_second > 0 else 0.0
            tokens_before = tokens
            points.append((step, total))
        return points

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training until the end, at the speed of the last logged step; None if that is not known."""
        speeds = self.points("tokens_per_second")
        epochs = self.points("epoch")
        tokens = self.tokens_after(self.last_step)
        planned_epochs = self.settings.get("train.epochs")
        if self.planned_steps:
            tokens_left = self.tokens_after(self.planned_steps) - tokens
        elif planned_epochs and epochs and epochs[-1][1]:
            tokens_left = int(tokens * max(0.0, planned_epochs / epochs[-1][1] - 1))
        else:
            return None
        return tokens_left / speeds[-1][1] if speeds and speeds[-1][1] > 0 else None

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """The results that `evaluate` saved, by step; those of a sample come before those of all data."""
        files = sorted((self.folder / EVALUATIONS).glob("*.json"))
        results = [read_json(path) for path in files if not path.name.endswith(".predictions.json")]
        return sorted(results, key=lambda result: (result.get("step") or 0, "sample" not in perplexity_card(result)))

    def bits_per_byte_at(self, step: int | None) -> float | None:
        """Bits per byte of the valid split after a step, as training or `evaluate` measured them."""
        evaluated = [
            (result.get("step"), result["perplexity"].get("bits_per_byte"))
            for result in self.evaluations
            if perplexity_card(result).get("split") == "valid"
        ]
        return dict([*evaluated, *self.points("valid_bits_per_byte")]).get(step)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        """The continuations of `train.sample_prompts`, in order."""
        return read_metrics(self.folder / SAMPLES_FILE)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """What `textmill run` saved at its end: verdict, results and texts; empty if only `train` ran, or if its
        checkpoint is gone."""
        path = self.folder / SUMMARY_FILE
        summary = dict(read_json(path)) if path.is_file() else {}
        return summary if (self.folder / str(summary.get("inputs", {}).get("step"))).is_dir() else {}

    @cached_property
    def notes(self) -> list[dict[str, Any]]:
        """Notes with their time, and the environment of each start."""
        return read_notes(self.folder / NOTES_FILE)

    @cached_property
    def account(self) -> dict[str, Any]:
        """What prepare counted, if the corpus is still next to the run."""
        path = Path(str(self.settings.get("corpus.folder") or self.folder.parent / STAGE_FOLDERS["corpus"]))
        return dict(read_json(path / "account.json")) if (path / "account.json").is_file() else {}

    @cached_property
    def tokens_by_source(self) -> dict[str, dict[str, dict[str, int]]]:
        """By the names of `corpus.sources` what each split has of them, if the store is still next to the run."""
        path = Path(str(self.settings.get("tokens.folder") or self.folder.parent / STAGE_FOLDERS["tokens"]))
        return dict(open_manifest(path).get("sources", {})) if (path / MANIFEST).is_file() else {}

    @property
    def stopped(self) -> dict[str, Any]:
        """Why the run stopped before its end; empty if it did not."""
        path = self.folder / STOPPED_FILE
        return dict(read_json(path)) if path.is_file() else {}


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has its config, and metrics or a checkpoint."""
    return (folder / RUN_YAML).is_file() and ((folder / METRICS_FILE).is_file() or bool(list_checkpoints(folder)))


def list_runs(folder: Path) -> list[Path]:
    """All runs in a folder and below it, by path."""
    if not folder.is_dir():
        raise TextmillError(f"{folder}: no such folder")
    return sorted({path.parent for path in folder.rglob(RUN_YAML) if is_run(path.parent)})


def find_run(where: str) -> Path:
    """The run folder at WHERE: the folder itself, its project, or the run of one of its checkpoints; before the
    last one of `train.generations` begins, the latest one before it."""
    folder = Path(where)
    if not folder.is_dir():
        raise TextmillError(f"{where}: no such folder; name the folder of a run or of its project")
    for place in (folder, folder / STAGE_FOLDERS["train"], folder.resolve().parent):
        if is_run(place):
            return place
        if generations := list(filter(is_run, place.glob("generation-*"))):
            return max(generations, key=lambda one: (len(one.name), one.name))
    if (folder / PROJECT_YAML).is_file():
        raise TextmillError(f"{where}: no run there yet; {advise_training(folder)}")
    raise TextmillError(
        f"{where}: no run there; a run has {RUN_YAML} and {METRICS_FILE}; name its folder or its project"
    )


def read_run(folder: Path) -> RunFiles:
    """Read the files of a run folder; a running one is read as it is now."""
    newest = list(list_checkpoints(folder).values())[-1:]
    metrics = folder / METRICS_FILE
    try:
        lines = read_metrics(metrics)
    except OSError as error:
        raise TextmillError(f"{format_path(metrics)}: cannot be read: {error.strerror}") from None
    progress = read_json(newest[0] / "progress.json") if newest else {}
    recorded = build_config(read_yaml(folder / RUN_YAML)[0], file=folder / RUN_YAML)
    settings = {**flatten(recorded.model_dump(mode="json")), **recorded.results("train")}
    return RunFiles(
        folder,
        settings,
        lines,
        read_metric(list_checkpoints(folder), VALID_LOSS),
        progress if isinstance(progress, dict) else {},
        _count_parameters(newest[0], str(settings.get("model.family", ""))) if newest else None,
        *read_best_values(folder),
    )


def _count_parameters(checkpoint: Path, family: str) -> int | None:
    """The parameters of a model; the file of a user's own family is not run for a report, so its weights are counted,
    which an adapter does not have."""
    if not is_own_file(family):
        return read_shape(checkpoint).parameters
    return None if is_adapter(checkpoint) else count_model(checkpoint)


def perplexity_card(result: dict[str, Any]) -> dict[str, Any]:
    """How `evaluate` measured a perplexity; empty if it measured other tasks."""
    card: dict[str, Any] = result.get("perplexity", {}).get("card", {})
    return card


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level with dots: {'train': {'batch': 8}} -> {'train.batch': 8}."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
