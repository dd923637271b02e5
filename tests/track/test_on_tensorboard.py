"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from textmill.config import TrackConfig

pytest.importorskip("tensorboard")


def scalars_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def log_steps(folder: Path, start: int, steps: range, loss: float) -> None:
    from textmill.track.on_tensorboard import new_tracker

    tracker = new_tracker(TrackConfig(), folder, start, {})
    for step in steps:
        tracker.log(step, {"loss": loss / step, "learning_rate": 1e-3})
    tracker.close()


def test_scalars_read_back(tmp_path: Path) -> None:
    log_steps(tmp_path, 0, range(1, 6), 1.0)
    events = scalars_of(tmp_path)
    assert set(events.Tags()["scalars"]) == {"loss", "learning_rate"}
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (step, pytest.approx(1 / step, rel=1e-6)) for step in range(1, 6)
    ]


def test_a_resumed_run_is_one_curve_without_the_lost_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log_steps(tmp_path, 0, range(1, 9), 1.0)
    # Event files are read in the order of their names, which start with their creation time in seconds.
    later = time.time() + 5
    monkeypatch.setattr("time.time", lambda: later)
    log_steps(tmp_path, 5, range(6, 11), 2.0)
    losses = scalars_of(tmp_path).Scalars("loss")
    assert [event.step for event in losses] == list(range(1, 11))
    assert losses[6].value == pytest.approx(2 / 7, rel=1e-6)
