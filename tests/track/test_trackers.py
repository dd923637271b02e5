"""All trackers together: a failing one never stops training, a missing package is an error at the start."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kill_train import train_arguments
from textmill.cli import main
from textmill.config import TrackConfig
from textmill.errors import TextmillError
from textmill.track import Trackers, open_trackers
from textmill.track.console import Throughput
from textmill.track.jsonl import METRICS_FILE, NOTES_FILE, read_metrics


def opened(folder: Path, stream: io.StringIO, *, start: int = 0, **config: Any) -> Trackers:
    with contextlib.redirect_stdout(stream):
        throughput = Throughput(10, start, lambda step: 64 * step, flops_per_token=1e6, peak_flops=None)
        return open_trackers(TrackConfig(**config), folder, throughput, {"train.batch": 8})


class Broken:
    """Fails from the second log on."""

    logged = closed = 0

    def log(self, step: int, values: dict[str, float]) -> None:
        self.logged += 1
        if self.logged > 1:
            raise OSError("no space\nleft on device")

    def close(self) -> None:
        self.closed += 1
        raise OSError("still no space")


def test_console_and_metrics_are_always_written(tmp_path: Path) -> None:
    stream = io.StringIO()
    trackers = opened(tmp_path, stream)
    trackers.log(3, {"loss": 2.5})
    trackers.note("saved step-0000003")
    trackers.close()
    trackers.close()
    assert "loss 2.5000" in stream.getvalue()
    assert stream.getvalue().endswith("saved step-0000003\n")
    assert read_metrics(tmp_path / METRICS_FILE) == [{"step": 3, "loss": 2.5}]


def test_opening_at_a_step_removes_later_metrics(tmp_path: Path) -> None:
    for start in (0, 3):
        trackers = opened(tmp_path, io.StringIO(), start=start)
        for step in range(start + 1, 6):
            trackers.log(step, {"loss": float(step)})
        trackers.close()
    assert [line["step"] for line in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3, 4, 5]


def test_a_failing_tracker_is_switched_off_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers, broken = opened(tmp_path, io.StringIO()), Broken()
    trackers.add("broken", lambda: broken)
    for step in range(1, 6):
        trackers.log(step, {"loss": 1.0})
    trackers.close()
    assert (
        capsys.readouterr().err
        == "textmill: broken is switched off: OSError: no space left on device; training continues\n"
    )
    assert (broken.logged, broken.closed) == (2, 1)
    assert len(read_metrics(tmp_path / METRICS_FILE)) == 5


def test_a_tracker_that_cannot_open_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trackers = opened(tmp_path / "not there", io.StringIO())
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert f"{METRICS_FILE} is switched off" in warnings[0]
    assert f"{NOTES_FILE} is switched off" in warnings[1]


def test_a_closed_console_does_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    trackers = opened(tmp_path, stream)
    stream.close()
    trackers.note("into the void")
    trackers.log(1, {"loss": 1.0})
    trackers.note("and again")
    trackers.close()
    assert capsys.readouterr().err.count("console is switched off") == 1
    assert read_metrics(tmp_path / METRICS_FILE)


def test_a_keyboard_interrupt_is_raised() -> None:
    class Interrupted(Broken):
        def log(self, step: int, values: dict[str, float]) -> None:
            raise KeyboardInterrupt

    trackers = Trackers()
    trackers.add("interrupted", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        trackers.log(1, {})


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_at_the_start(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == kind or name == f"textmill.track.on_{kind}"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, kind, None)
    with pytest.raises(TextmillError) as caught:
        opened(tmp_path, io.StringIO(), kinds=[kind])
    assert str(caught.value) == f"track.kinds: '{kind}' needs {kind}; run: pip install 'textmill[track]'"
    assert not (tmp_path / METRICS_FILE).exists()


def test_a_broken_package_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def explode(name: str) -> Any:
        raise RuntimeError("built for another machine")

    monkeypatch.setattr("textmill.track.import_module", explode)
    trackers = opened(tmp_path, io.StringIO(), kinds=["wandb"])
    trackers.log(1, {"loss": 1.0})
    trackers.close()
    assert capsys.readouterr().err.count("wandb is switched off: RuntimeError: built for another machine") == 1


def test_trackers_get_environment_and_fingerprints(
    tokenized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    class Silent:
        def log(self, step: int, values: dict[str, float]) -> None: ...
        def mark(self, step: int, text: str) -> None: ...
        def close(self) -> None: ...

    def new_tracker(config: TrackConfig, folder: Path, start: int, settings: dict[str, Any]) -> Silent:
        given.append(settings)
        return Silent()

    monkeypatch.setattr("textmill.track.on_tensorboard.new_tracker", new_tracker)
    arguments = [*train_arguments(tokenized, tmp_path / "run", 1), "train.warmup=0", "train.evaluate_batches=1"]
    assert main([*arguments, "track.kinds=tensorboard"]) == 0
    assert given[0]["environment"]["python"] == sys.version.split()[0]
    progress = json.loads((tmp_path / "run" / "step-0000001" / "progress.json").read_text())
    assert given[0]["fingerprints"]["tokens"] == progress["made_from"]["tokens"]
    assert given[0]["fingerprints"]["tokenizer"] == progress["made_from"]["tokenizer"]
    assert given[0]["train"]["steps"] == 1
