"""Ctrl-C at a prompt, and a second one at every instruction of the handler of the first."""

from __future__ import annotations

import itertools
import signal
import sys
from types import FrameType
from typing import Any

import pytest

from textmill.generation import prompts as module
from textmill.generation.prompts import Terminal


class Second:
    """Raises ctrl-C before one of the bytecode instructions of the module's functions."""

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
    """Return the line typed after ctrl-C at the prompt, and a second ctrl-C while it is handled."""
    keys = itertools.chain(["ctrl-C"], itertools.repeat("a line"))

    def pressed(prompt: str) -> str:
        if (key := next(keys)) == "ctrl-C":
            signal.raise_signal(signal.SIGINT)
        return key

    def answered(*values: object, **options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        print(*values, **options)

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


def test_second_ctrl_c_does_not_end_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in itertools.count():
        second = Second(place)
        assert first_line(second, monkeypatch) == "a line", place
        if not second.pressed:
            break
        assert capsys.readouterr().out.count("ctrl-D ends") in (1, 2), place
    assert place > 50, "all operations of the prompt, of what breaks it off and of what hears"


def test_line_is_read_and_signal_handlers_are_restored(
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
