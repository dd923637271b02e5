"""The command check: compares every file of a folder with the length and checksum in its manifest."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.folders import OPTIMIZER_MANIFEST, find_checkpoint_damage, list_checkpoints
from textmill.config import STAGE_FOLDERS
from textmill.errors import TextmillError
from textmill.storage.files import is_as_written
from textmill.storage.stages import MANIFEST, find_stage_damage, find_yaml_damage
from textmill.tokens.store import find_index_errors, open_store, store_paths, store_prefix
from textmill.where import open_where


def check(where: str, settings: list[str] | None = None) -> list[Path]:
    """Check the folder of a stage, checkpoint, run or project, or all folders of a config; return what was checked."""
    root = Path(where)
    if not root.is_dir() and store_paths(store_prefix(root))[0].is_file():
        return _check_store(store_prefix(root))
    if root.is_dir():
        folders = [root, *(root / name for name in STAGE_FOLDERS.values())]
    else:
        config = open_where(where, settings or []).config
        folders = [config.folder_of(stage) for stage in STAGE_FOLDERS]
    checkpoints = [path for folder in folders for path in list_checkpoints(folder).values()]
    stages = [folder for folder in folders if (folder / MANIFEST).is_file() and not (folder / "progress.json").exists()]
    if (root / "progress.json").exists():
        checkpoints.append(root)
    if not stages and not checkpoints:
        raise TextmillError(f"{where}: nothing to check there; name a folder that textmill wrote")
    faults = []
    for folder in stages:
        faults += _report(folder, find_stage_damage(folder))
    for folder in checkpoints:
        faults += _report(folder, find_checkpoint_damage(folder) or _find_manifest_damage(folder))
    for run in {path.parent for path in checkpoints if path != root}:
        if damage := find_yaml_damage(run):  # its run.yaml has a line with its own checksum
            faults += _report(run, damage)
    if faults:
        raise TextmillError(f"{len(faults)} faults: {'; '.join(faults)}")
    return stages + checkpoints


def _check_store(prefix: Path) -> list[Path]:
    """A store without a manifest has no checksums: only whether its two files agree can be checked."""
    faults = find_index_errors(open_store(prefix).index)
    if faults:
        raise TextmillError(f"{prefix}: {'; '.join(faults)}")
    print(
        f"check: {prefix}: the index is consistent and fits the ids; there is no manifest, so no checksums to compare"
    )
    return [prefix]


def _find_manifest_damage(checkpoint: Path) -> list[str]:
    manifests = [path for name in (MANIFEST, OPTIMIZER_MANIFEST) if (path := checkpoint / name).is_file()]
    return [
        f"{path.name} has other bytes than those that were written" for path in manifests if not is_as_written(path)
    ]


def _report(folder: Path, faults: list[str]) -> list[str]:
    print(f"check: {folder}: {'intact' if not faults else '; '.join(faults)}")
    return [f"{folder}: {fault}" for fault in faults]
