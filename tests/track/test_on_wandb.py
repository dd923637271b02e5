"""W&B offline: a run file in the run folder, one id over resumes, no console output."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from textmill.config import TrackConfig
from textmill.track import open_trackers
from textmill.track.console import Throughput

pytest.importorskip("wandb", reason="needs the extra long")


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


@pytest.mark.long
def test_an_offline_run_is_written_next_to_the_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(
        sys.modules, "openai", raising=False
    )  # W&B prints an advertisement if it sees it, and another test may have loaded it
    monkeypatch.setenv("WANDB_ENTITY", "millers")
    monkeypatch.setenv("WANDB_NAME", "stone 1")
    monkeypatch.setenv("WANDB_TAGS", "first,small")
    monkeypatch.setenv("WANDB_RUN_GROUP", "stones")
    from wandb.proto.wandb_internal_pb2 import Record

    from textmill.track.on_wandb import new_tracker, read_or_create_id

    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = new_tracker(TrackConfig(project="mill"), tmp_path, 0, {"train.batch": 8})
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
    assert (run.project, run.entity, run.display_name, run.run_group) == ("mill", "millers", "stone 1", "stones")
    assert list(run.tags) == ["first", "small"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("key", "given_mode", "mode", "line"),
    [
        ("x" * 40, None, "online", "wandb: online, project textmill; WANDB_MODE=offline keeps the metrics here"),
        ("x" * 40, "offline", "offline", "wandb: offline (WANDB_MODE=offline); send it later: wandb sync "),
        (None, None, "offline", "wandb: offline (no key: set WANDB_API_KEY or run wandb login); send it later: "),
        (None, "online", "online", "wandb: online, project textmill"),
        ("file", None, "online", "wandb: online, project textmill"),
    ],
)
def test_a_run_is_online_if_there_is_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    key: str | None,
    given_mode: str | None,
    mode: str,
    line: str,
) -> None:
    """W&B gets the mode, and a line says which; nothing is sent here."""
    import wandb

    given: dict[str, Any] = {}

    class Silent:
        def finish(self) -> None:
            pass

    def init(**settings: Any) -> Silent:
        given.update(settings)
        return Silent()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if key == "file":
        (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {'x' * 40}\n")
        (tmp_path / "netrc").chmod(0o600)
    elif key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    if given_mode:
        monkeypatch.setenv("WANDB_MODE", given_mode)
    else:
        monkeypatch.delenv("WANDB_MODE", raising=False)
    throughput = Throughput(1, 0, lambda step: step, flops_per_token=1.0, peak_flops=None)
    open_trackers(TrackConfig(kinds=["wandb"]), tmp_path, throughput, {}).close()
    assert given["mode"] == mode
    assert line in capsys.readouterr().out


def test_the_id_stays_at_resume_and_changes_for_a_new_run(tmp_path: Path) -> None:
    from textmill.track.on_wandb import read_or_create_id

    first = read_or_create_id(tmp_path, "koşu 1", 0)
    assert first.startswith("ko-u-1-")
    assert read_or_create_id(tmp_path, "koşu 1", 40) == first
    assert read_or_create_id(tmp_path, "koşu 1", 0) != first
