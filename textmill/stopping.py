"""Signals that ask training to stop: the first is heard at the end of the step, the second ends at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

from textmill.errors import EXIT_STOPPED

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


class Stopping:
    """Hears signals while it is open."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the signal that asked to stop."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def _hear(self, number: int, _: FrameType | None) -> None:
        if self.asked is not None:
            os._exit(EXIT_STOPPED)
        self.asked = signal.Signals(number).name

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
