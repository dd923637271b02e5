"""Ctrl-C at a prompt, and a second one at every place where what answers the first may be."""

from __future__ import annotations

import itertools
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from textmill.generation import terminal as module
from textmill.generation.terminal import Terminal


class Second:
    """Presses ctrl-C before one of the operations that this module's functions are made of."""

    def __init__(self, place: int) -> None:
        self.left, self.pressed = place, False

    def trace(self, frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.pressed:
            self.pressed, self.left = self.left == 0, self.left - 1
            if self.pressed:
                signal.raise_signal(signal.SIGINT)
        return self.trace


def first_line(second: Second, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What is typed after a first ctrl-C at the prompt, and one more while it is answered."""
    keys = itertools.chain(["ctrl-C"], itertools.repeat("a line"))

    def pressed(prompt: str) -> str:
        if (key := next(keys)) == "ctrl-C":
            signal.raise_signal(signal.SIGINT)
        return key

    def answered(*words: object, **how: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print(*words, **how)

    monkeypatch.setattr("builtins.input", pressed)
    monkeypatch.setattr(module, "print", answered, raising=False)
    with Terminal() as terminal:
        lines, before = terminal.lines(), sys.gettrace()
        sys.settrace(second.trace)
        try:
            return next(lines)
        except KeyboardInterrupt:
            return None
        finally:
            sys.settrace(before)


def test_a_second_ctrl_c_finds_nothing_to_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in itertools.count():
        second = Second(place)
        assert first_line(second, monkeypatch) == "a line", place
        if not second.pressed:
            break
        assert capsys.readouterr().out.count("ctrl-D ends") in (1, 2), place
    assert place > 50, "all operations of the prompt, of what breaks it off and of what hears"


def test_a_line_is_read_and_the_signals_are_given_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    typed = iter(["one", "two"])

    def ending(prompt: str) -> str:
        if (line := next(typed, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", ending)
    with Terminal() as terminal:
        assert list(terminal.lines()) == ["one", "two"]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert capsys.readouterr().out == "\n"
