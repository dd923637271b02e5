"""Signals that ask training to stop: the first is heard at the end of the step, the second ends at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from textmill.errors import EXIT_STOPPED, AlreadyReported, Stopped, TextmillError
from textmill.storage.files import write_json

STOPPED = "stopped.json"
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


class Stopping:
    """Hears signals while it is open, in a thread: the main one may be waiting for a device or for other processes."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """The name of the signal that asked to stop."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._far, near = socket.socketpair()
            near.setblocking(False)
            self._near, self._fd_before = near, signal.set_wakeup_fd(near.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._hear, name="signals", daemon=True).start()
            self._before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        return self

    def _hear(self) -> None:
        """The interpreter writes the number of each signal to a socket, whatever its main thread is at."""
        with self._far:
            while numbers := self._far.recv(1):
                if numbers[0] not in SIGNALS:
                    continue
                if self.asked is not None:
                    os._exit(EXIT_STOPPED)
                self.asked = signal.Signals(numbers[0]).name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._fd_before)
            self._near.close()


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Around a wait in which the interpreter hears no signal, before there is anything to save: they end the process as it stands."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def stopped(run: Path, why: str, step: int | None = None) -> None:
    """Leave word that the run ended before its time and may go on; exit codes do not outlive every launcher."""
    if run.is_dir():  # else it has not begun
        write_json(run / STOPPED, {"why": why, **({} if step is None else {"step": step})})


def stopped_by(signal: str, run: Path, step: int, first: bool) -> TextmillError:
    """What ends a run that was asked to stop and is saved; one process says so for all."""
    if not first:
        return AlreadyReported(EXIT_STOPPED)
    stopped(run, f"stopped by {signal}", step)
    return Stopped(f"stopped by {signal} at step {step:,}, saved; the same command goes on from there")
