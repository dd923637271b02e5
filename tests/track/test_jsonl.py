"""metrics.jsonl: exact numbers, complete lines, and truncation at resume."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from textmill.track.jsonl import METRICS_FILE, JsonLines, read_metrics, truncate_after


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8))
def test_every_float_reads_back_bitwise(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("floats") / METRICS_FILE
    lines = JsonLines(path)
    for step, value in enumerate(values):
        lines.log(step, {"loss": value})
    lines.close()
    assert [bits(line["loss"]) for line in read_metrics(path)] == [bits(value) for value in values]


def test_step_is_first_and_each_line_is_flushed(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / METRICS_FILE)
    lines.log(7, {"loss": 1.5, "learning_rate": 1e-3})
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 7, "loss": 1.5, "learning_rate": 0.001}\n'
    lines.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_is_null(tmp_path: Path, value: float) -> None:
    lines = JsonLines(tmp_path / METRICS_FILE)
    lines.log(1, {"loss": value, "batch": 2})
    lines.close()
    assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "loss": null, "batch": 2}\n'


@given(st.integers(0, 12), st.integers(0, 400))
def test_truncation_keeps_complete_lines_up_to_the_step(
    tmp_path_factory: pytest.TempPathFactory, step: int, killed_at: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / METRICS_FILE
    whole = [json.dumps({"step": number, "loss": 1 / number}).encode() + b"\n" for number in range(1, 11)]
    path.write_bytes(b"".join(whole)[:killed_at])
    complete = [line for index, line in enumerate(whole) if sum(map(len, whole[: index + 1])) - 1 <= killed_at]
    truncate_after(path, step)
    assert path.read_bytes() == b"".join(complete[:step])


def test_truncate_then_append_gives_the_uninterrupted_file(tmp_path: Path) -> None:
    undisturbed, killed = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path, steps in ((undisturbed, 9), (killed, 7)):
        lines = JsonLines(path)
        for step in range(1, steps + 1):
            lines.log(step, {"loss": 1 / step})
        lines.close()
    with open(killed, "ab") as stream:
        stream.write(b'{"step": 8, "lo')
    truncate_after(killed, 5)
    lines = JsonLines(killed)
    for step in range(6, 10):
        lines.log(step, {"loss": 1 / step})
    lines.close()
    assert killed.read_bytes() == undisturbed.read_bytes()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b"3", b'{"loss": 1.0}', b'{"step": "x"}', b"null"])
def test_lines_without_a_step_are_dropped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / METRICS_FILE
    path.write_bytes(b'{"step": 1}\n' + line + b"\n" + b'{"step": 2}\n')
    truncate_after(path, 2)
    assert [found["step"] for found in read_metrics(path)] == [1, 2]
    assert len(path.read_bytes().splitlines()) == 2


def test_a_missing_file_is_no_error(tmp_path: Path) -> None:
    truncate_after(tmp_path / METRICS_FILE, 3)
    assert not (tmp_path / METRICS_FILE).exists()
    assert read_metrics(tmp_path / METRICS_FILE) == []
