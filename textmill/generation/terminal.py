"""Reads lines that a user types; ctrl-C interrupts the current work, never the program."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, TextIO, TypeVar

T = TypeVar("T")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a standard stream is a terminal; None is a stream that was closed before the program started."""
    return stream is not None and stream.isatty()


class Terminal:
    """Handles ctrl-C while it is open.

    KeyboardInterrupt is raised only inside `run_interruptible`, and only once, so that a second ctrl-C cannot interrupt
    the handling of the first. SIGTERM and SIGHUP end the program at once: there is nothing to save.
    """

    def __init__(self) -> None:
        self._interruptible = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            handlers: dict[signal.Signals, Any] = {
                signal.SIGINT: self._on_interrupt,
                signal.SIGTERM: signal.SIG_DFL,
                signal.SIGHUP: signal.SIG_DFL,
            }
            self._before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_interrupt(self, *_: Any) -> None:
        if self._interruptible:
            self._interruptible = False
            raise KeyboardInterrupt

    def run_interruptible(self, work: Callable[[], T]) -> T | None:
        """Run `work` and return its result; None if ctrl-C interrupted it."""
        try:
            try:
                self._interruptible = True
                return work()
            finally:
                self._interruptible = False
        except KeyboardInterrupt:
            return None

    def lines(self) -> Iterator[str]:
        """Yield each line typed at a prompt, or read from a pipe, until the input ends."""
        if sys.stdin is None:
            return
        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            with suppress(ImportError):
                import_module("readline")  # arrow keys bring back earlier lines
        while True:
            try:
                line = self.run_interruptible(lambda: input(prompt))
            except EOFError:
                print()
                return
            if line is None:
                print("\nctrl-D ends", flush=True)
            else:
                yield line
