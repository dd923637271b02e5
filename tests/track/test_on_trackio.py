"""Trackio in a process of its own, since it reads its folder from the environment when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trackio", reason="needs the extra long")
CODE = """
import json, sys
from pathlib import Path
from textmill.config import TrackConfig
from textmill.track.on_trackio import new_tracker
from trackio.sqlite_storage import SQLiteStorage

folder, config = Path(sys.argv[1]), TrackConfig(project="mill")
for start, stop in ((0, 5), (3, 7)):
    tracker = new_tracker(config, folder, start, {"train.batch": 8})
    for step in range(start + 1, stop + 1):
        tracker.log(step, {"loss": 6.0 / step})
    tracker.log(stop, {"valid_loss": 1.0})
    tracker.close()
(name,) = {run if isinstance(run, str) else run["name"] for run in SQLiteStorage.get_runs("mill")}
(folder / "seen.json").write_text(json.dumps([name, SQLiteStorage.get_logs("mill", name)], default=str))
"""


@pytest.mark.long
def test_a_resumed_run_has_each_point_once_and_prints_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "data"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    name, points = json.loads((tmp_path / "seen.json").read_text())
    assert name == (tmp_path / "trackio" / "id.txt").read_text().strip()
    assert [(point["step"], point["loss"]) for point in points if "loss" in point] == [
        (step, 6.0 / step) for step in range(1, 8)
    ]
    assert [point["step"] for point in points if "valid_loss" in point] == [5, 7]
