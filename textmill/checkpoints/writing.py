"""Write a checkpoint folder, all ranks together, and remove old ones; folders.py shows what is in it and reads it.

A `FilePlan` says which tensors go into which file, and which rank writes it. Three tensors of 3 GB on two ranks, with
files of at most 5 GB: model-00001-of-00003.safetensors is written by rank 0, -00002- by rank 1, -00003- by rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import OPTIMIZER_FILES, OPTIMIZER_MANIFEST, link_best, list_checkpoints
from textmill.errors import TextmillError
from textmill.processes.ranks import SINGLE_PROCESS, Ranks, gather_results, report_each
from textmill.storage.files import find_damage, remove_folder, replace_folder, try_remove, write_bytes, write_json
from textmill.storage.stages import MANIFEST
from textmill.storage.tensor_files import SHARD_INDEX, Named, encode_safetensors

MAX_FILE_BYTES = 5_000_000_000
"""Most bytes of tensors in one file; larger state is written as several files, which transformers also opens."""


@dataclass(frozen=True)
class Snapshot:
    """The content of one checkpoint in host memory: the weights and optimizer state that this rank writes."""

    step: int
    weights: Iterable[Named]
    optimizer_state: Iterable[Named]
    progress: dict[str, Any]
    files: dict[str, bytes]
    """Other files by name: config.json, run.yaml, the tokenizer."""
    file_plans: tuple[FilePlan, FilePlan]
    """Plans for weights and optimizer state of all ranks."""


def write_checkpoint(run: Path, snapshot: Snapshot, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Write one checkpoint, all ranks together: a temporary folder, the manifest last, then an atomic rename."""
    final = run / f"step-{snapshot.step:07d}"
    folder = run / f"{final.name}.tmp-new"
    try:
        entries_by_rank = gather_results(ranks, lambda: _write_own_files(folder, snapshot, ranks))
        gather_results(ranks, lambda: _commit(folder, final, snapshot, entries_by_rank, ranks) if ranks.first else None)
    except BaseException:
        if ranks.first:
            try_remove(folder)
        raise
    return final


def _write_own_files(folder: Path, snapshot: Snapshot, ranks: Ranks) -> list[dict[str, Any]]:
    """Write this rank's files; return the manifest entries of its weight files and of its moment files."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_plan, moment_plan = snapshot.file_plans
    return [
        _write_planned_files(folder, weight_plan, snapshot.weights, ranks),
        _write_planned_files(folder, moment_plan, snapshot.optimizer_state, ranks),
    ]


def _write_planned_files(folder: Path, plan: FilePlan, named: Iterable[Named], ranks: Ranks) -> dict[str, Any]:
    """Write the files of one plan that this rank writes; return their manifest entries."""
    file_by_tensor = plan.file_by_tensor()
    entries = {}
    for file_name, tensors in itertools.groupby(named, lambda tensor: file_by_tensor[tensor[0]]):
        entries[file_name] = write_bytes(folder / file_name, report_each(ranks, encode_safetensors(list(tensors))))
    if not file_by_tensor and plan.rank == plan.first_writer % plan.world:  # no tensors at all: an empty file
        file_name = f"{plan.stem}.safetensors"
        entries[file_name] = write_bytes(folder / file_name, encode_safetensors([]))
    return entries


def _commit(folder: Path, final: Path, snapshot: Snapshot, entries_by_rank: list[Any], ranks: Ranks) -> None:
    """On rank 0, once all tensor files exist: write the other files and the manifests, then rename the folder."""
    weight_plan, _ = snapshot.file_plans
    files = {name: write_bytes(folder / name, [data]) for name, data in report_each(ranks, snapshot.files.items())}
    optimizer_files: dict[str, Any] = {}
    for weight_entries, moment_entries in entries_by_rank:
        files |= weight_entries
        optimizer_files |= moment_entries
    if len(weight_plan.files) > 1:
        files[SHARD_INDEX] = write_json(folder / SHARD_INDEX, weight_plan.index())
    files["progress.json"] = write_json(folder / "progress.json", snapshot.progress)
    if damage := find_damage(folder, {**files, **optimizer_files}, deep=False):
        raise TextmillError(
            f"{folder.parent}: {damage[0]}, although a rank wrote it; "
            "set train.folder to a folder that all machines share"
        )
    write_json(folder / OPTIMIZER_MANIFEST, {"files": optimizer_files})
    write_json(folder / MANIFEST, {"step": snapshot.step, "files": files})
    replace_folder(folder, final)


@dataclass
class FilePlan:
    """Distributes tensors over files below a size limit, and the files over ranks in turn.

    All ranks add the same tensors in the same order, so they get the same plan without talking to each other.
    """

    stem: str
    size_of: Callable[[str], int]
    max_bytes: int = MAX_FILE_BYTES
    rank: int = 0
    world: int = 1
    first_writer: int = 0
    files: list[dict[str, int]] = field(default_factory=list, init=False)
    """For each file, its tensors and their bytes."""

    def add(self, name: str) -> bool:
        """Add the next tensor; return whether this rank writes it."""
        size = self.size_of(name)
        if not self.files or sum(self.files[-1].values()) + size > self.max_bytes:
            self.files.append({})
        self.files[-1][name] = size
        return (self.first_writer + len(self.files) - 1) % self.world == self.rank

    def file_by_tensor(self) -> dict[str, str]:
        """The file name of each tensor, as transformers names shards."""
        names = [f"{self.stem}.safetensors"]
        if (count := len(self.files)) > 1:
            names = [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        return {tensor: name for name, file in zip(names, self.files, strict=False) for tensor in file}

    def index(self) -> dict[str, Any]:
        """The shard index of transformers, needed when there is more than one file."""
        return {
            "metadata": {"total_size": sum(sum(file.values()) for file in self.files)},
            "weight_map": self.file_by_tensor(),
        }


def plan_files(stem: str, named: Iterable[Named], max_bytes: int = MAX_FILE_BYTES) -> tuple[FilePlan, list[Named]]:
    """A file plan for tensors that are all in this process, and these tensors as a list."""
    tensors = list(named)
    plan = FilePlan(stem, {name: values.nbytes for name, values in tensors}.__getitem__, max_bytes)
    for name, _ in tensors:
        plan.add(name)
    return plan, tensors


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
            for path in (folder / OPTIMIZER_MANIFEST, *folder.glob(OPTIMIZER_FILES)):
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
