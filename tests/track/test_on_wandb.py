"""W&B offline: a run file in the run folder, one id over resumes, no console output."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from textmill.config import TrackConfig, WandbConfig
from textmill.track import read_or_create_id

pytest.importorskip("wandb")


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: a LevelDB log of 32 KiB blocks, which starts with W&B's own magic bytes."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # a header never spans two blocks
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a complete record, or the last part of one
            yield whole
            whole = b""


def test_the_id_stays_at_resume_and_changes_for_a_new_run(tmp_path: Path) -> None:
    first = read_or_create_id(tmp_path, "koşu 1", 0)
    assert first.startswith("ko-u-1-")
    assert read_or_create_id(tmp_path, "koşu 1", 40) == first
    assert read_or_create_id(tmp_path, "koşu 1", 0) != first


def test_an_offline_run_is_written_next_to_the_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(
        sys.modules, "openai", raising=False
    )  # W&B prints an advertisement if it sees it, and another test may have loaded it
    from wandb.proto.wandb_internal_pb2 import Record

    from textmill.track.on_wandb import new_tracker

    wandb = WandbConfig(entity="millers", tags=["first", "small"])
    tracker = new_tracker(TrackConfig(project="mill", group="stones", wandb=wandb), tmp_path, 0, {"train.batch": 8})
    for step in (1, 2):
        tracker.log(step, {"loss": 3.0 / step})
    tracker.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert read_or_create_id(tmp_path / "wandb", tmp_path.name, 2) in file.name
    records = [Record.FromString(record) for record in records_of(file)]
    logged = [
        {(item.key or ".".join(item.nested_key)): item.value_json for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    assert [float(values["loss"]) for values in logged] == [3.0, 1.5]
    run = next(record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (run.project, run.entity, run.run_group, list(run.tags)) == ("mill", "millers", "stones", ["first", "small"])
    assert capfd.readouterr() == ("", "")
