"""Trackio tracker: a local dashboard (`trackio show`), or a Hugging Face Space if `track.trackio.space` names one."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from textmill.config import TrackConfig
from textmill.track import read_or_create_id


class Trackio:
    """One run of Trackio; a resumed training continues it and adds no point twice."""

    def __init__(self, config: TrackConfig, run_id: str, start: int, settings: dict[str, Any]) -> None:
        name = f"{config.name} {run_id.rpartition('-')[2]}" if config.name else run_id
        with redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=config.project,
                name=name,
                space_id=config.trackio.space,
                config=settings,
                resume="allow" if start else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        # Steps after the checkpoint that a killed process has logged are computed again, with the same numbers.
        known = SQLiteStorage.get_max_step_for_run(config.project, name) if start else None
        self._last = -1 if known is None else int(known)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log a step that is not there yet."""
        if step > self._last:
            self._run.log(dict(values), step=step)

    def mark(self, step: int, text: str) -> None:
        """Add the change as a text at its step."""
        self._run.log({"change": text}, step=step)

    def close(self) -> None:
        """Write what is queued and end the run."""
        with redirect_stdout(io.StringIO()):
            trackio.finish()


def new_tracker(config: TrackConfig, folder: Path, start: int, settings: dict[str, Any]) -> Trackio:
    """A run in Trackio's own folder (TRACKIO_DIR); view it with `trackio show`."""
    folder = folder.resolve()
    return Trackio(config, read_or_create_id(folder / "trackio", folder.name, start), start, settings)
