"""The command check: compares every file of a folder with the length and checksum in its manifest."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.folders import find_checkpoint_damage, list_checkpoints
from textmill.config import STAGE_FOLDERS
from textmill.errors import TextmillError
from textmill.storage.stages import MANIFEST, find_stage_damage
from textmill.tokens.index_formats import find_index_errors
from textmill.tokens.store import open_store, store_paths, store_prefix
from textmill.where import open_where


def check(where: str, settings: list[str] | None = None) -> list[Path]:
    """Check a stage's folder, a checkpoint, a run, a project, or all that a config has written; return what was checked."""
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
        faults += _report(folder, find_checkpoint_damage(folder))
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


def _report(folder: Path, faults: list[str]) -> list[str]:
    print(f"check: {folder}: {'intact' if not faults else '; '.join(faults)}")
    return [f"{folder}: {fault}" for fault in faults]
