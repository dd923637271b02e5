"""What a checkpoint folder is: written whole, found by looking, verified before it is used, pruned by rule."""

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
"""In a run's folder: a link to the checkpoint with the lowest valid loss."""
STEP_NAME = re.compile(r"^step-(\d{7,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint folder of ours, or any Hugging Face model folder (then step is 0 and progress empty)."""

    folder: Path
    step: int
    progress: dict[str, Any]

    def weights(self) -> Iterator[Named]:
        """The weights in transformers' names and layout; an adapter's merged into its base's."""
        return read_weights(self.folder)

    def moments(self) -> Iterator[Named]:
        """The optimizer's state by weight name: m/NAME, v/NAME; refused, when it is asked for, where it was pruned."""
        if not (self.folder / OPTIMIZER_MANIFEST).is_file():
            raise TextmillError(
                f"{self.folder}: its optimizer was pruned; go on from a newer checkpoint, "
                f"or start a new run from its weights: model.init_from={self.folder}"
            )
        for name in sorted(read_json(self.folder / OPTIMIZER_MANIFEST)["files"]):
            yield from read_tensors(self.folder / name)

    @property
    def tokenizer(self) -> Path:
        """Where its tokenizer stands: here, or with the base of an adapter."""
        return tokenizer_folder(self.folder)

    @property
    def valid_loss(self) -> float | None:
        """The loss on the valid split measured at this very step."""
        loss = self.progress.get("valid_loss")
        return None if loss is None else float.fromhex(loss)


@dataclass(frozen=True)
class Snapshot:
    """What one checkpoint holds, in host memory: of weights and moments those that this process writes."""

    step: int
    weights: Iterable[Named]
    moments: Iterable[Named]
    progress: dict[str, Any]
    files: dict[str, bytes]
    """More files by name: config.json, run.yaml, the tokenizer's."""
    deals: tuple[FilePlan, FilePlan] | None = None
    """Which tensors of all processes go into which file; if not said, all are here and go by the limit."""


def list_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoint folders of a run by step, oldest first; whole or not."""
    found = {
        int(match[1]): path for path in run.glob("step-*") if (match := STEP_NAME.match(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def find_checkpoint_damage(folder: Path, *, deep: bool = True) -> list[str]:
    """What is wrong with a checkpoint folder of ours; nothing, if it is whole."""
    try:
        manifest = read_json(folder / MANIFEST)
        faults = find_damage(folder, manifest["files"], deep=deep)
        if (folder / OPTIMIZER_MANIFEST).exists():  # without it, the optimizer was pruned
            faults += find_damage(folder, read_json(folder / OPTIMIZER_MANIFEST)["files"], deep=deep)
    except TextmillError as error:
        return [str(error).removeprefix(f"{folder}/")]
    except (KeyError, TypeError, AttributeError):
        return ["a manifest does not name its files"]
    return faults


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint folder of ours, verified bit by bit, or a Hugging Face model folder as it is."""
    match = STEP_NAME.match(folder.name)
    if match or (folder / "progress.json").exists():
        if faults := find_checkpoint_damage(folder):
            raise TextmillError(f"{folder}: damaged: {'; '.join(faults)}; use another step")
        return _read_checkpoint(folder)
    if not (folder / "config.json").is_file() and not is_adapter(folder):
        raise TextmillError(f"{folder}: not a checkpoint; it has no config.json")
    return Checkpoint(folder, 0, {})


def find_checkpoint(run: Path, which: StepChoice = "latest") -> Checkpoint | None:
    """The newest whole checkpoint, the best one, or that of a step; damaged ones are named and passed over."""
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
            raise TextmillError(f"{run}: no checkpoint has a validation loss; use --step latest")
    for folder in candidates:
        if not (faults := find_checkpoint_damage(folder)):
            return _read_checkpoint(folder)
        warn(f"{folder} is damaged and passed over: {'; '.join(faults)}")
    if candidates:
        raise TextmillError(f"{run}: every checkpoint is damaged; start anew with --force")
    return None


def _read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint that was verified just now."""
    progress = read_json(folder / "progress.json")
    return Checkpoint(folder, int(progress["step"]), progress)


def find_model(run: Path, init_from: str | None, which: StepChoice = "latest") -> Checkpoint:
    """The model that a config stands for: its run's checkpoint, or, where nothing is trained yet, the weights it starts from."""
    if (found := find_checkpoint(run, which)) is not None:
        return found
    if init_from is None:
        raise TextmillError(f"{run}: no checkpoint there yet; run textmill train first")
    return open_model(init_from)


def open_model(name: str) -> Checkpoint:
    """The model of a run (or of the root above it), a checkpoint, a Hugging Face folder or a hub name."""
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
    """The valid losses of a run's checkpoints by step, where one was measured."""
    return {step: loss for step, folder in list_checkpoints(run).items() if (loss := _valid_loss(folder)) is not None}


def link_best(run: Path) -> int | None:
    """Let `best` lead to the checkpoint with the lowest valid loss, and say its step; where there are no links, `--step best` finds it."""
    losses, link = read_valid_losses(run), run / BEST_LINK
    best = min(losses, key=losses.__getitem__) if losses else None
    with suppress(OSError):
        if link.is_symlink():
            link.unlink()
        if best is not None:
            link.symlink_to(list_checkpoints(run)[best].name)
    return best


def write_checkpoint(run: Path, snapshot: Snapshot, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Write one checkpoint as a temporary folder, its manifest last, and put it in place; all processes together."""
    final = run / f"step-{snapshot.step:07d}"
    folder = run / f"{final.name}.tmp-new"
    if snapshot.deals is None:
        (weights, held), (moments, state) = (
            plan_files("model", snapshot.weights),
            plan_files("optimizer", snapshot.moments),
        )
        snapshot = replace(snapshot, weights=held, moments=state, deals=(weights, moments))
    try:
        shares = gather_results(ranks, lambda: _write_own_files(folder, snapshot, ranks))
        gather_results(ranks, lambda: _commit(folder, final, snapshot, shares, ranks) if ranks.first else None)
    except BaseException:
        if ranks.first:
            try_remove(folder)
        raise
    return final


def _write_own_files(folder: Path, snapshot: Snapshot, ranks: Ranks) -> list[dict[str, Any]]:
    """The files of this process's weights and those of its moments, with their accounts."""
    assert snapshot.deals
    folder.mkdir(parents=True, exist_ok=True)
    shares = zip(snapshot.deals, (snapshot.weights, snapshot.moments), strict=True)
    return [write_planned_files(folder, deal, named, partial(report_each, ranks)) for deal, named in shares]


def _commit(folder: Path, final: Path, snapshot: Snapshot, shares: list[Any], ranks: Ranks) -> None:
    """All that is written once, by the first process, when every file of tensors is there."""
    assert snapshot.deals
    files = {name: write_bytes(folder / name, [data]) for name, data in report_each(ranks, snapshot.files.items())}
    files |= {name: account for weights, _ in shares for name, account in weights.items()}
    if len(snapshot.deals[0].files) > 1:
        files[SHARD_INDEX] = write_json(folder / SHARD_INDEX, snapshot.deals[0].index())
    files["progress.json"] = write_json(folder / "progress.json", snapshot.progress)
    moments = {name: account for _, moments in shares for name, account in moments.items()}
    if faults := find_damage(folder, {**files, **moments}, deep=False):
        raise TextmillError(
            f"{folder.parent}: {faults[0]}, though a process wrote it; set train.folder to a place that all machines share"
        )
    write_json(folder / OPTIMIZER_MANIFEST, {"files": moments})
    write_json(folder / MANIFEST, {"step": snapshot.step, "files": files})
    replace_folder(folder, final)


def prune(run: Path, *, keep: int, keep_every: int | None) -> list[Path]:
    """Remove checkpoints that no rule keeps; the optimizer goes from those kept for their weights only."""
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
    """Remove what a killed run left half written or half removed."""
    for pattern in ("step-*.tmp-*", "step-*.old-*"):
        for path in run.glob(pattern):
            try_remove(path)
