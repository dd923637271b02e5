"""Console output during training."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from textmill.track.console import LiveConsole, PlainConsole, Throughput, format_time, format_valid, new_console


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def throughput(clock: Clock, start: int = 0, peak: float | None = None) -> Throughput:
    return Throughput(
        1000, start, lambda step: 4096 * step, flops_per_token=2e6, peak_flops=peak, clock=clock, start_time=0.0
    )


def test_plain_lines() -> None:
    clock, stream = Clock(), io.StringIO()
    console = new_console(throughput(clock), stream)
    clock.now = 24.0
    console.log(120, {"loss": 4.21712, "learning_rate": 5.8e-4, "tokens_per_second": 12345.4})
    console.log(500, {"valid_loss": 3.91234})
    console.note("saved step-0000500 [best]")
    console.close()
    assert stream.getvalue().splitlines() == [
        "step   120/1000  loss 4.2171  lr 5.8e-04  12,345 tok/s  left 2:56 at most",
        "step   500/1000  valid loss 3.9123",
        "saved step-0000500 [best]",
    ]


def test_a_valid_loss_gets_its_own_line() -> None:
    stream = io.StringIO()
    PlainConsole(throughput(Clock()), stream).log(1, {"loss": 2.0, "valid_loss": 3.0, "tokens_per_second": 5.0})
    assert stream.getvalue().splitlines() == [
        "step     1/1000  loss 2.0000  5 tok/s  left 0:00 at most",
        "step     1/1000  valid loss 3.0000",
    ]


def test_epoch_and_bits_per_byte() -> None:
    values = {"loss": 2.0, "bits_per_byte": 1.23456, "epoch": 0.126, "learning_rate": 1e-3, "tokens_per_second": 5.0}
    assert throughput(Clock()).format_values(1, values)[:3] == [
        "loss 2.0000 (1.235 bits/byte)",
        "epoch 0.13",
        "lr 1.0e-03",
    ]
    valid = {"valid_loss": 3.0, "valid_bits_per_byte": 1.5, "valid_accuracy": 0.25}
    assert format_valid(valid) == "valid loss 3.0000  1.500 bits/byte  accuracy 25.0%"
    assert throughput(Clock()).format_values(1, {"loss": 2.0, "perplexity": 7.389})[1] == "ppl 7.39"
    valid |= {"valid_perplexity": 20.0855, "train_accuracy": 0.5}
    assert format_valid(valid) == "valid loss 3.0000  1.500 bits/byte  ppl 20.09  accuracy 25.0% (train 50.0%)"


def test_mfu_only_for_known_chips() -> None:
    values = {"loss": 1.0, "tokens_per_second": 2000.0}
    assert "MFU 40.0%" in throughput(Clock(), peak=1e10).format_values(5, values)
    assert not any("MFU" in word for word in throughput(Clock()).format_values(5, values))


def test_remaining_time_counts_this_process_only() -> None:
    clock = Clock()
    resumed = throughput(clock, start=900)
    assert resumed.seconds_left(900) is None
    clock.now = 100.0  # ten steps and a long evaluation
    assert resumed.seconds_left(910) == pytest.approx(900.0)
    assert resumed.seconds_left(1000) == 0


def test_remaining_time_leaves_out_the_start() -> None:
    clock = Clock()
    compiled = throughput(clock)
    clock.now = 40.0
    assert compiled.format_values(1, {"loss": 9.0})[-1] == "left 11:06:00 at most"
    clock.now = 49.0
    assert compiled.format_values(10, {"loss": 8.0})[-1] == "left 16:30"
    clock.now = 199.0  # an evaluation and a save among the next ten
    assert compiled.format_values(20, {"loss": 8.0})[-1] == f"left {format_time(159 / 19 * 980)}"


def test_average_throughput_if_none_is_logged() -> None:
    clock = Clock()
    clock.now = 2.0
    assert "20,480 tok/s" in throughput(clock).format_values(10, {"loss": 1.0})


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (200, "3:20"), (3725, "1:02:05"), (180_000, "50:00:00")]
)
def test_format_time(seconds: float, text: str) -> None:
    assert format_time(seconds) == text


def test_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    stream = Terminal()
    console = new_console(throughput(Clock(), peak=1e10), stream)
    assert isinstance(console, LiveConsole)
    console.log(10, {"valid_loss": 3.5})
    console.log(20, {"loss": 4.25, "learning_rate": 1e-3, "tokens_per_second": 2000.0})
    console.note("saved [step-20]")
    console.advance(21)
    console.log(21, {"valid_loss": 3.25})
    console.close()
    seen = stream.getvalue()
    last = seen.split("\n")[-2].rpartition("\r")[2]
    assert last.startswith("step   21/1000"), "the line that stays has the last step"
    assert "loss 4.2500  valid 3.2500" in last, "the last line has the last valid loss"
    for words in (
        "21/1000",
        "loss 4.2500",
        "valid 3.2500",
        "lr 1.0e-03",
        "2,000 tok/s",
        "MFU 40.0%",
        "left",
        "saved [step-20]",
    ):
        assert words in seen


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(new_console(throughput(Clock()), Terminal()), PlainConsole)


def test_remaining_time_with_a_growing_batch() -> None:
    clock = Clock()
    clock.now = 10.0
    growing = Throughput(
        20, 0, lambda step: 100 * min(step, 10) + 300 * max(0, step - 10), 2e6, None, clock=clock, start_time=0.0
    )
    assert growing.speed(10, {}) == 100
    assert growing.seconds_left(10) == pytest.approx(30.0), "the ten steps to come have three times the tokens"


def test_a_line_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell goes back to the start of the line at a carriage return; the line is replaced at most five times a
    second, and notes and valid losses are lines of their own."""
    kernel = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=True))
    monkeypatch.setitem(sys.modules, "IPython", kernel)  # type: ignore[arg-type]
    clock, stream = Clock(), io.StringIO()
    console = new_console(throughput(clock), stream)
    clock.now = 10.0
    console.log(100, {"loss": 4.5})
    console.advance(101)  # too early to be shown
    assert "100/1000" in stream.getvalue()
    assert "101/1000" not in stream.getvalue()
    console.log(500, {"valid_loss": 3.9})
    console.note("saved <best>")
    console.close()
    lines = [line.rpartition("\r")[2] for line in stream.getvalue().split("\n")]
    assert lines[:2] == ["step 500: valid loss 3.9000", "saved <best>"]
    assert lines[2].startswith("step  500/1000 ━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌  loss 4.5000  valid 3.9000")
