"""Weights & Biases tracker: writes into the run folder, and sends it to W&B if there is a key."""

from __future__ import annotations

import netrc
import os
import secrets
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# wandb reads it at import: otherwise it reports its own errors over the network, even in offline mode.
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

import wandb

from textmill.config import TrackConfig
from textmill.storage.files import format_path, write_text


class WeightsAndBiases:
    """One W&B run; a resumed training continues it."""

    def __init__(self, config: TrackConfig, folder: Path, run_id: str, settings: dict[str, Any]) -> None:
        offline = is_offline()
        self._run = wandb.init(
            project=config.project,
            name=os.environ.get("WANDB_NAME", folder.name),
            id=run_id,
            dir=str(folder),
            config=settings,
            mode="offline" if offline else "online",
            resume=None if offline else "allow",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, save_code=False, disable_job_creation=True
            ),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log a step; W&B ignores steps that it already has, and a resumed training repeats the same numbers."""
        self._run.log(dict(values), step=step)

    def mark(self, step: int, text: str) -> None:
        """Add the change to the summary of the run."""
        self._run.summary[f"change after step {step}"] = text

    def close(self) -> None:
        """End the W&B run and wait for W&B's process to write its file; `finish` alone returns before that."""
        self._run.finish()
        wandb.teardown()


def is_offline() -> bool:
    """Whether nothing is sent: as WANDB_MODE says, else if there is no key."""
    return not _has_key() if "WANDB_MODE" not in os.environ else os.environ["WANDB_MODE"] != "online"


def describe_mode(config: TrackConfig, folder: Path) -> str:
    """One line about where the metrics go, and why."""
    if not is_offline():
        return f"wandb: online, project {config.project}; WANDB_MODE=offline keeps the metrics here"
    mode = os.environ.get("WANDB_MODE")
    why = f"WANDB_MODE={mode}" if mode else "no key: set WANDB_API_KEY or run wandb login"
    return f"wandb: offline ({why}); send it later: wandb sync {format_path(folder / 'wandb')}/offline-run-*"


def _has_key() -> bool:
    """Whether there is a key in the environment, or in the file that `wandb login` writes."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def new_tracker(config: TrackConfig, folder: Path, start: int, settings: dict[str, Any]) -> WeightsAndBiases:
    """A W&B run under wandb/ in the run folder; upload it later with `wandb sync FOLDER/wandb/offline-run-*`."""
    folder = folder.resolve()
    return WeightsAndBiases(config, folder, read_or_create_id(folder / "wandb", folder.name, start), settings)


def read_or_create_id(folder: Path, name: str, start: int) -> str:
    """The id of the run; a new run, at step 0, gets a new one with the name of its folder."""
    id_file = folder / "id.txt"
    if start > 0 and id_file.is_file() and (known := id_file.read_text(encoding="utf-8").strip()):
        return known
    plain = "".join(char if char.isascii() and char.isalnum() else "-" for char in name).strip("-")
    new_id = f"{plain[:40] or 'run'}-{secrets.token_hex(4)}"
    id_file.parent.mkdir(parents=True, exist_ok=True)
    write_text(id_file, new_id + "\n")
    return new_id
