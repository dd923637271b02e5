"""Checkpoint folders: write them atomically, find and verify them, prune old ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from textmill.checkpoints.adapters import is_adapter, read_weights, tokenizer_folder
from textmill.checkpoints.file_plan import FilePlan, plan_files, write_planned_files
from textmill.errors import TextmillError, warn
from textmill.processes.ranks import SINGLE_PROCESS, Ranks, gather_results, report_each
from textmill.storage.files import (
    find_damage,
    read_json,
    remove_folder,
    replace_folder,
    try_remove,
    write_bytes,
    write_json,
)
from textmill.storage.hub import find_model_folder
from textmill.storage.stages import MANIFEST
from textmill.storage.tensor_files import SHARD_INDEX, Named, read_tensors

StepChoice = int | Literal["latest", "best"]
OPTIMIZER_MANIFEST = "optimizer.manifest.json"
BEST_LINK = "best"
"""A symbolic link in the run folder to the checkpoint with the lowest valid loss."""
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

    def moments(self) -> Iterator[Named]:
        """The optimizer state by weight name: m/NAME, v/NAME, momentum/NAME; an error if it was pruned."""
        if not (self.folder / OPTIMIZER_MANIFEST).is_file():
            raise TextmillError(
                f"{self.folder}: its optimizer state was pruned; resume from a newer checkpoint, "
                f"or start a new run from its weights: model.init_from={self.folder}"
            )
        for name in sorted(read_json(self.folder / OPTIMIZER_MANIFEST)["files"]):
            yield from read_tensors(self.folder / name)

    @property
    def tokenizer(self) -> Path:
        """The folder of its tokenizer: this one, or the base of an adapter."""
        return tokenizer_folder(self.folder)

    @property
    def valid_loss(self) -> float | None:
        """The loss on the valid split at this step, if it was measured."""
        loss = self.progress.get("valid_loss")
        return None if loss is None else float.fromhex(loss)


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint in host memory: the weights and moments that this rank writes."""

    step: int
    weights: Iterable[Named]
    moments: Iterable[Named]
    progress: dict[str, Any]
    files: dict[str, bytes]
    """Other files by name: config.json, run.yaml, the tokenizer."""
    file_plans: tuple[FilePlan, FilePlan] | None = None
    """Plans for weights and moments of all ranks; None if this process has all of them."""


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by step, oldest first; not verified."""
    found = {
        int(match[1]): path for path in run.glob("step-*") if (match := STEP_NAME.match(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


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
    match = STEP_NAME.match(folder.name)
    if match or (folder / "progress.json").exists():
        if damage := find_checkpoint_damage(folder):
            raise TextmillError(f"{folder}: damaged: {'; '.join(damage)}; use another step")
        return _read_checkpoint(folder)
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        raise TextmillError(f"{folder}: not a checkpoint; it has no config.json")
    return Checkpoint(folder, 0, {})


def find_checkpoint(run: Path, which: StepChoice = "latest") -> Checkpoint | None:
    """The newest intact checkpoint, the best one, or that of a step; damaged ones are skipped with a warning."""
    folders = list_checkpoints(run)
    if isinstance(which, int):
        if which not in folders:
            raise TextmillError(f"{run}: no checkpoint of step {which}; found {', '.join(map(str, folders)) or 'none'}")
        return open_checkpoint(folders[which])
    candidates = [folder for _, folder in sorted(folders.items(), reverse=True)]
    if which == "best":
        losses = read_valid_losses(run)
        candidates = [folders[step] for step in sorted(losses, key=losses.__getitem__)]
        if folders and not candidates:
            raise TextmillError(f"{run}: no checkpoint has a valid loss; use --step latest")
    for folder in candidates:
        if not (damage := find_checkpoint_damage(folder)):
            return _read_checkpoint(folder)
        warn(f"{folder} is damaged, skipping it: {'; '.join(damage)}")
    if candidates:
        raise TextmillError(f"{run}: every checkpoint is damaged; start from scratch with --force")
    return None


def _read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint that has just been verified."""
    progress = read_json(folder / "progress.json")
    return Checkpoint(folder, int(progress["step"]), progress)


def find_model(run: Path, init_from: str | None, which: StepChoice = "latest") -> Checkpoint:
    """The model of a config: a checkpoint of its run or, before training, the weights that it starts from."""
    if (found := find_checkpoint(run, which)) is not None:
        return found
    if init_from is None:
        raise TextmillError(f"{run}: no checkpoint yet; run textmill train first")
    return open_model(init_from)


def open_model(name: str) -> Checkpoint:
    """Open a model by the folder of a project, run, checkpoint or Hugging Face model, or by hub name."""
    folder = find_model_folder(name)
    for run in (folder, folder / "run"):
        if (found := find_checkpoint(run)) is not None:
            return found
    return open_checkpoint(folder)


def _valid_loss(folder: Path) -> float | None:
    try:
        loss = Checkpoint(folder, 0, read_json(folder / "progress.json")).valid_loss
        return loss if loss is not None and math.isfinite(loss) else None
    except (TextmillError, ValueError, AttributeError):
        return None


def read_valid_losses(run: Path) -> dict[int, float]:
    """The valid losses of a run's checkpoints by step, where they were measured."""
    return {step: loss for step, folder in list_checkpoints(run).items() if (loss := _valid_loss(folder)) is not None}


def link_best(run: Path) -> int | None:
    """Point the link `best` to the checkpoint with the lowest valid loss; return its step.

    On file systems without symbolic links, `--step best` still finds it.
    """
    losses, link = read_valid_losses(run), run / BEST_LINK
    best = min(losses, key=losses.__getitem__) if losses else None
    with suppress(OSError):
        if link.is_symlink():
            link.unlink()
        if best is not None:
            link.symlink_to(list_checkpoints(run)[best].name)
    return best


def write_checkpoint(run: Path, snapshot: Snapshot, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Write one checkpoint, all ranks together: a temporary folder, the manifest last, then an atomic rename."""
    final = run / f"step-{snapshot.step:07d}"
    folder = run / f"{final.name}.tmp-new"
    if snapshot.file_plans is None:
        weight_plan, weights = plan_files("model", snapshot.weights)
        moment_plan, moments = plan_files("optimizer", snapshot.moments)
        snapshot = replace(snapshot, weights=weights, moments=moments, file_plans=(weight_plan, moment_plan))
    try:
        entries = gather_results(ranks, lambda: _write_own_files(folder, snapshot, ranks))
        gather_results(ranks, lambda: _commit(folder, final, snapshot, entries, ranks) if ranks.first else None)
    except BaseException:
        if ranks.first:
            try_remove(folder)
        raise
    return final


def _write_own_files(folder: Path, snapshot: Snapshot, ranks: Ranks) -> list[dict[str, Any]]:
    """Write this rank's files; return the manifest entries of its weight files and of its moment files."""
    assert snapshot.file_plans
    folder.mkdir(parents=True, exist_ok=True)
    planned = zip(snapshot.file_plans, (snapshot.weights, snapshot.moments), strict=True)
    return [write_planned_files(folder, plan, named, partial(report_each, ranks)) for plan, named in planned]


def _commit(folder: Path, final: Path, snapshot: Snapshot, entries: list[Any], ranks: Ranks) -> None:
    """On rank 0, once all tensor files exist: write the other files and the manifests, then rename the folder."""
    assert snapshot.file_plans
    files = {name: write_bytes(folder / name, [data]) for name, data in report_each(ranks, snapshot.files.items())}
    files |= {name: entry for weights, _ in entries for name, entry in weights.items()}
    if len(snapshot.file_plans[0].files) > 1:
        files[SHARD_INDEX] = write_json(folder / SHARD_INDEX, snapshot.file_plans[0].index())
    files["progress.json"] = write_json(folder / "progress.json", snapshot.progress)
    moments = {name: entry for _, moments in entries for name, entry in moments.items()}
    if damage := find_damage(folder, {**files, **moments}, deep=False):
        raise TextmillError(
            f"{folder.parent}: {damage[0]}, although a rank wrote it; "
            "set train.folder to a folder that all machines share"
        )
    write_json(folder / OPTIMIZER_MANIFEST, {"files": moments})
    write_json(folder / MANIFEST, {"step": snapshot.step, "files": files})
    replace_folder(folder, final)


def prune(run: Path, *, keep: int, keep_every: int | None) -> list[Path]:
    """Remove old checkpoints; those that stay only for their weights lose their optimizer state."""
    folders = list_checkpoints(run)
    newest = list(folders)[-keep:]
    best = link_best(run)
    removed = []
    for step, folder in folders.items():
        if step in newest:
            continue
        if step == best or (keep_every and step % keep_every == 0):
            for path in (folder / OPTIMIZER_MANIFEST, *folder.glob("optimizer*.safetensors")):
                try_remove(path)
        else:
            remove_folder(folder)
            removed.append(folder)
    return removed


def remove_leftovers(run: Path) -> None:
    """Remove temporary folders that a killed run left."""
    for pattern in ("step-*.tmp-*", "step-*.old-*"):
        for path in run.glob(pattern):
            try_remove(path)
