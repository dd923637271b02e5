"""Weights & Biases, into the run folder and offline unless asked otherwise."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

# Read once, when wandb loads: without it a fault inside wandb would be reported over the network, offline or not.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from textmill.config import TrackConfig
from textmill.storage.files import write_text

ID_FILE = "id.txt"


class WeightsAndBiases:
    """One W&B run; a resumed training goes on in it."""

    def __init__(self, config: TrackConfig, folder: Path, run_id: str, settings: dict[str, Any]) -> None:
        self._run = wandb.init(
            project=config.wandb.project,
            name=config.wandb.name or folder.name,
            id=run_id,
            dir=str(folder),
            config=settings,
            mode="offline" if config.wandb.offline else "online",
            resume=None if config.wandb.offline else "allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, disable_job_creation=True
            ),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """W&B passes over steps that it has already: a resumed training gives the same numbers there."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run on W&B's side, and wait for its own process, which writes the file: `finish` alone comes back before that."""
        self._run.finish()
        wandb.teardown()


def run_id_of(folder: Path, start: int) -> str:
    """The folder's name and a few random digits, kept in the folder: the same at resume, another when begun anew."""
    kept = folder / "wandb" / ID_FILE
    if start > 0 and kept.is_file() and (known := kept.read_text(encoding="utf-8").strip()):
        return known
    name = "".join(sign if sign.isascii() and sign.isalnum() else "-" for sign in folder.name).strip("-")
    fresh = f"{name[:40] or 'run'}-{secrets.token_hex(4)}"
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_text(kept, fresh + "\n")
    return fresh


def new_tracker(config: TrackConfig, folder: Path, start: int, settings: dict[str, Any]) -> WeightsAndBiases:
    """A run under wandb/ in the run folder; `wandb sync FOLDER/wandb/offline-run-*` sends it later."""
    folder = folder.resolve()
    return WeightsAndBiases(config, folder, run_id_of(folder, start), settings)
