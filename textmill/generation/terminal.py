"""Lines that a person types, and ctrl-C there: it breaks off what is at hand, never the program."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Terminal:
    """Has ctrl-C while it is open: raised inside `run_interruptible` alone and once, so that no second one meets what answers the first.

    SIGTERM ends the program as it stands: nothing here needs saving.
    """

    def __init__(self) -> None:
        self._raising = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        if threading.current_thread() is threading.main_thread():
            mine: dict[signal.Signals, Any] = {signal.SIGINT: self._hear, signal.SIGTERM: signal.SIG_DFL}
            self._before = {number: signal.signal(number, handler) for number, handler in mine.items()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, *_: Any) -> None:
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt

    def run_interruptible(self, work: Callable[[], T]) -> T | None:
        """What some work gives; nothing, where ctrl-C broke it off."""
        try:
            try:
                self._raising = True
                return work()
            finally:
                self._raising = False
        except KeyboardInterrupt:
            return None

    def lines(self) -> Iterator[str]:
        """Each line that is typed after a prompt, or that a pipe holds, to the end of the input."""
        prompt = "> " if sys.stdin.isatty() else ""
        if prompt:
            with suppress(ImportError):
                import_module("readline")  # lines typed before come back with the arrow keys
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
