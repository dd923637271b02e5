"""Write a checkpoint folder, all ranks together; folders.py shows what is in it and reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from textmill.checkpoints.file_plan import FilePlan, plan_files, write_planned_files
from textmill.checkpoints.folders import OPTIMIZER_MANIFEST
from textmill.errors import TextmillError
from textmill.processes.ranks import SINGLE_PROCESS, Ranks, gather_results, report_each
from textmill.storage.files import find_damage, replace_folder, try_remove, write_bytes, write_json
from textmill.storage.stages import MANIFEST
from textmill.storage.tensor_files import SHARD_INDEX, Named


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


def write_checkpoint(run: Path, snapshot: Snapshot, ranks: Ranks = SINGLE_PROCESS) -> Path:
    """Write one checkpoint, all ranks together: a temporary folder, the manifest last, then an atomic rename."""
    final = run / f"step-{snapshot.step:07d}"
    folder = run / f"{final.name}.tmp-new"
    if snapshot.file_plans is None:
        weight_plan, weights = plan_files("model", snapshot.weights)
        moment_plan, moments = plan_files("optimizer", snapshot.moments)
        snapshot = replace(snapshot, weights=weights, moments=moments, file_plans=(weight_plan, moment_plan))
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
    assert snapshot.file_plans
    folder.mkdir(parents=True, exist_ok=True)
    weight_plan, moment_plan = snapshot.file_plans
    report = partial(report_each, ranks)
    return [
        write_planned_files(folder, weight_plan, snapshot.weights, report),
        write_planned_files(folder, moment_plan, snapshot.moments, report),
    ]


def _commit(folder: Path, final: Path, snapshot: Snapshot, entries_by_rank: list[Any], ranks: Ranks) -> None:
    """On rank 0, once all tensor files exist: write the other files and the manifests, then rename the folder."""
    assert snapshot.file_plans
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
