"""Checkpoint folders: find and verify them, choose the newest or the best.

    RUN/step-0001000/
        manifest.json              length and SHA-256 of every file but those of the optimizer; written last
        model.safetensors          or model-00001-of-00002.safetensors ... with an index, as transformers shards
        config.json, tokenizer.json, run.yaml, progress.json
        optimizer.safetensors      its moments, by the names of the weights
        optimizer.manifest.json    the same of these files; pruning removes it first, then them
    RUN/best -> step-0000900

`find_checkpoint` chooses an intact checkpoint of a run, `open_model` opens whatever a user names as a model. writing.py
writes such a folder and removes old ones.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from textmill.checkpoints.adapters import is_adapter, read_weights, tokenizer_folder
from textmill.checkpoints.best import VALID_LOSS, BestRule, metric_of, read_metric, read_rule
from textmill.errors import TextmillError, warn
from textmill.storage.files import find_damage, format_path, read_json
from textmill.storage.hub import find_model_folder
from textmill.storage.stages import MANIFEST, PROJECT_YAML
from textmill.storage.tensor_files import Named, read_tensors

StepChoice = int | Literal["latest", "best"]
OPTIMIZER_MANIFEST = "optimizer.manifest.json"
OPTIMIZER_FILES = "optimizer*.safetensors"
BEST_LINK = "best"
"""A symbolic link in the run folder to the best checkpoint."""
STEP_NAME = re.compile(r"^step-(\d{7,})$")


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint of a run, or a Hugging Face model folder (then step is 0 and progress is empty)."""

    folder: Path
    step: int
    progress: dict[str, Any]

    def weights(self) -> Iterator[Named]:
        """The weights in transformers' names and layout; an adapter is merged into its base."""
        return read_weights(self.folder)

    def optimizer_state(self) -> Iterator[Named]:
        """The optimizer state by weight name: m/NAME, v/NAME, momentum/NAME, raw/NAME; an error if it is missing."""
        if not has_optimizer_state(self.folder):
            raise TextmillError(_describe_missing_state(self.folder))
        for name in sorted(read_json(self.folder / OPTIMIZER_MANIFEST)["files"]):
            yield from read_tensors(self.folder / name)

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer: this one, or the base of an adapter."""
        return tokenizer_folder(self.folder)

    @property
    def valid_loss(self) -> float | None:
        """The loss on the valid split at this step, if it was measured."""
        return metric_of(self.progress, VALID_LOSS)


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by step, oldest first; not verified."""
    folders = {}
    for path in run.glob("step-*"):
        match = STEP_NAME.match(path.name)
        if match and path.is_dir():
            folders[int(match[1])] = path
    return dict(sorted(folders.items()))


def find_checkpoint_damage(folder: Path, *, deep: bool = True) -> list[str]:
    """Problems of a checkpoint folder of a run; empty if it is intact."""
    try:
        manifest = read_json(folder / MANIFEST)
        damage = find_damage(folder, manifest["files"], deep=deep)
        if (folder / OPTIMIZER_MANIFEST).exists():  # without it, the optimizer state was pruned
            damage += find_damage(folder, read_json(folder / OPTIMIZER_MANIFEST)["files"], deep=deep)
    except TextmillError as error:
        return [str(error).removeprefix(f"{folder}/")]
    except (KeyError, TypeError, AttributeError):
        return ["a manifest does not list its files"]
    return damage


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint of a run, after checking all its checksums, or a Hugging Face model folder."""
    if STEP_NAME.match(folder.name) or (folder / "progress.json").exists():
        if damage := find_checkpoint_damage(folder):
            raise TextmillError(f"{folder}: damaged: {'; '.join(damage)}; use another step")
        return _read_checkpoint(folder)
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        raise TextmillError(f"{folder}: not a checkpoint; it has no config.json")
    return Checkpoint(folder, 0, {})


def find_checkpoint(run: Path, which: StepChoice | None = "latest", *, to_resume: bool = False) -> Checkpoint | None:
    """The checkpoint of a step, the newest or best intact one; None: the best, or the newest if there is no best one.

    Damaged ones are skipped with a warning; `to_resume` also those whose optimizer state is damaged.
    """
    if isinstance(which, int):
        folders = list_checkpoints(run)
        if which not in folders:
            raise TextmillError(f"{run}: no checkpoint of step {which}; found {', '.join(map(str, folders)) or 'none'}")
        return open_checkpoint(folders[which])
    candidates = rank_checkpoints(run, which)
    without_state = []
    for folder in candidates:
        damage = find_checkpoint_damage(folder)
        if not damage and to_resume and not has_optimizer_state(folder) and any(folder.glob(OPTIMIZER_FILES)):
            damage = [f"{OPTIMIZER_MANIFEST} is missing"]  # pruning would have removed the optimizer state too
            without_state.append(folder)
        if not damage:
            return _read_checkpoint(folder)
        warn(f"{folder} is damaged, skipping it: {'; '.join(damage)}")
    if without_state:
        raise TextmillError(_describe_missing_state(without_state[0]))
    if candidates:
        raise TextmillError(f"{run}: every checkpoint is damaged; start from scratch with --force")
    return None


def rank_checkpoints(run: Path, which: Literal["latest", "best"] | None) -> list[Path]:
    """The checkpoints of a run in the order in which they are tried; None: best first, then those not measured."""
    folders = list_checkpoints(run)
    rule, values = read_best_values(run) if which != "latest" else (BestRule(), {})
    ranked = [folders[step] for step in rule.sorted_steps(values)]
    if which == "best":
        if folders and not ranked:
            raise TextmillError(f"{run}: no checkpoint has a {rule.name}; use --step latest")
        return ranked
    return ranked + [folder for step, folder in reversed(folders.items()) if step not in values]


def has_optimizer_state(folder: Path) -> bool:
    """Whether a run can be resumed from this checkpoint; pruning removes the manifest of its optimizer state first."""
    return (folder / OPTIMIZER_MANIFEST).is_file()


def _describe_missing_state(folder: Path) -> str:
    checkpoints = list_checkpoints(folder.parent)
    steps = [str(step) for step, other in checkpoints.items() if has_optimizer_state(other)]
    resume = f"resume from a step that has one (--step {' or '.join(steps)}), or start" if steps else "start"
    return (
        f"{folder}: has no optimizer state: it was pruned, or {OPTIMIZER_MANIFEST} is lost; "
        f"{resume} a new run from its weights: model.init_from={folder}"
    )


def _read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint that has just been verified."""
    progress = read_json(folder / "progress.json")
    return Checkpoint(folder, int(progress["step"]), progress)


def find_model(run: Path, init_from: str | None, which: StepChoice | None = None) -> Checkpoint:
    """The model of a config: a checkpoint of its run (default: the best) or, before training, `init_from`.

    Says which checkpoint it is, on stderr.
    """
    checkpoint = find_checkpoint(run, which)
    if checkpoint is not None:
        warn(f"using {describe_choice(checkpoint, named=which is not None)}")
        return checkpoint
    if init_from is None:
        raise TextmillError(f"{format_path(run)}: no checkpoint yet; {advise_training(run.parent)}")
    return open_model(init_from)


def advise_training(project: Path) -> str:
    """What to do before a command that needs a trained model; `project` is the folder that will hold its run."""
    if (project / PROJECT_YAML).is_file():
        return f"train the model first: textmill run {shlex.quote(format_path(project))}"
    return "train a model first, with textmill run or textmill train"


def describe_choice(checkpoint: Checkpoint, *, named: bool) -> str:
    """A checkpoint, the metric that chooses the best one and, unless the user named it, the newest if it is another."""
    folders = list_checkpoints(checkpoint.folder.parent)
    rule = read_rule(folders.values())
    value = metric_of(checkpoint.progress, rule.metric)
    text = format_path(checkpoint.folder)
    if value is not None:
        text += f", {rule.describe(value)}"
    newest = max(folders, default=checkpoint.step)
    if named or newest == checkpoint.step:
        return text
    return f"{text}, the best checkpoint; the newest is {format_path(folders[newest])}"


def open_model(name: str, key: str = "model.init_from") -> Checkpoint:
    """Open a model by the folder of a project, run, checkpoint or Hugging Face model, or by hub name.

    Of a run it is the best checkpoint, or the newest if there is no best one. `key` is the setting that names it.
    """
    try:
        folder = find_model_folder(name)
    except TextmillError as error:
        raise TextmillError(f"{key}: {error}") from None
    for run in (folder, folder / "run"):
        checkpoint = find_checkpoint(run, None)
        if checkpoint is not None:
            return checkpoint
    return open_checkpoint(folder)


def read_best_values(run: Path) -> tuple[BestRule, dict[int, float]]:
    """The rule by which the best checkpoint of a run is chosen, and its metric in the checkpoints by step."""
    folders = list_checkpoints(run)
    rule = read_rule(folders.values())
    return rule, read_metric(folders, rule.metric)


def link_best(run: Path) -> int | None:
    """Point the link `best` to the best checkpoint; return its step.

    On file systems without symbolic links, `--step best` still finds it.
    """
    rule, values = read_best_values(run)
    best = rule.best_of(values)
    link = run / BEST_LINK
    with suppress(OSError):
        if link.is_symlink():
            link.unlink()
        if best is not None:
            link.symlink_to(list_checkpoints(run)[best].name)
    return best
