"""Progress as lines, and as a bar on a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from textmill.storage.progress import Bar, format_amount, format_duration, progress


def test_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("count", total=3, unit="documents") as bar:
        for _ in range(3):
            bar.advance()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("count: 3 documents in 0.0 s, ")
    assert printed.err.count("\n") == 1


def test_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 11.0, 15.0, 21.0, 22.0])
    monkeypatch.setattr("textmill.storage.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    lines = Bar("read", 100e6, "bytes", stream)
    for _ in range(4):
        lines.advance(22e6)
    lines.end()
    assert stream.getvalue().splitlines() == [
        "read: 44.0 MB of 100.0 MB (44%), 14 s left, 4.0 MB/s",
        "read: 88.0 MB of 100.0 MB (88%), 2.9 s left, 4.2 MB/s",
        "read: 88.0 MB in 22 s, 4.0 MB/s",
    ]


def test_a_second_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 20.0, 40.0])
    monkeypatch.setattr("textmill.storage.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    lines = Bar("read", 100e6, "bytes", stream, second_unit="tokens")
    lines.advance(50e6, 10_000_000)
    lines.end()
    assert stream.getvalue().splitlines() == [
        "read: 50.0 MB of 100.0 MB (50%), 20 s left, 2.5 MB/s, 500,000 tokens/s",
        "read: 50.0 MB in 40 s, 1.2 MB/s, 250,000 tokens/s",
    ]


def test_failed_work_prints_no_end_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError), progress("count"):
        raise RuntimeError
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.04, "0.0 s"), (9.94, "9.9 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (3599, "59 min 59 s"), (7500, "2 h 5 min")],
)
def test_durations(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected


def test_amounts() -> None:
    assert format_amount(1234567, "bytes") == "1.2 MB"
    assert format_amount(1234567, "tokens") == "1,234,567 tokens"
    assert format_amount(12, "") == "12"


def _read(terminal: int) -> str:
    """Read the rest of the terminal output; nothing if all was read and the other end is closed."""
    try:
        return os.read(terminal, 100_000).decode()
    except OSError:
        return ""


def test_bar_on_a_terminal(root: Path) -> None:
    ours, theirs = pty.openpty()
    code = (
        "from textmill.storage.progress import progress\n"
        "with progress('weigh', total=4e6, unit='bytes') as bar:\n"
        "    bar.last_line = 0\n"
        "    bar.advance(2e6)"
    )
    environment = {**os.environ, "PYTHONPATH": str(root), "TERM": "xterm", "COLUMNS": "120"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, env=environment, check=True, timeout=300)
    os.close(theirs)
    shown = "".join(iter(lambda: _read(ours), ""))
    os.close(ours)
    assert "\rweigh ... " in shown
    assert "\rweigh: ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌ 2.0 MB of 4.0 MB (50%), " in shown
    assert "\rweigh: 2.0 MB in " in shown
