"""Removes old checkpoints of a run, and what a killed run left."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.folders import OPTIMIZER_FILES, OPTIMIZER_MANIFEST, link_best, list_checkpoints
from textmill.storage.files import remove_folder, try_remove


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
