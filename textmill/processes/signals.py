"""Stop signals of a run, and exiting with the right code even if library threads are still running."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from textmill.errors import EXIT_BUG, EXIT_STOPPED, AlreadyReported, Interrupted, TextmillError
from textmill.storage.files import write_json

STOPPED_FILE = "stopped.json"
SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP]


def handled_signals() -> list[signal.Signals]:
    """The stop signals to handle: not SIGHUP where it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in SIGNALS if number != signal.SIGHUP or not ignored]


class StopSignals:
    """Receives stop signals in a thread, because the main thread may be waiting for a GPU or for other ranks."""

    def __init__(self) -> None:
        self.received: str | None = None
        """The name of the stop signal received."""
        self._old_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._read_end, write_end = socket.socketpair()
            write_end.setblocking(False)
            self._write_end = write_end
            self._old_wakeup_fd = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._receive, name="signals", daemon=True).start()
            self._old_handlers = {number: signal.signal(number, lambda *_: None) for number in handled_signals()}
        return self

    def _receive(self) -> None:
        """The interpreter writes each signal's number to the socket, whatever the main thread is doing."""
        with self._read_end:
            while numbers := self._read_end.recv(1):
                if numbers[0] not in SIGNALS:
                    continue
                if self.received is not None and numbers[0] == signal.SIGHUP:
                    continue  # a closed terminal sends it, and the shell sends it again: it is not a second request
                if self.received is not None:
                    os._exit(EXIT_STOPPED)
                self.received = signal.Signals(numbers[0]).name

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._old_handlers:
            for number, handler in self._old_handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            signal.set_wakeup_fd(self._old_wakeup_fd)
            self._write_end.close()


@contextmanager
def default_signals() -> Iterator[None]:
    """Let stop signals end the process at once, around a wait in C code before there is anything to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in handled_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def write_stopped_file(run: Path, why: str, step: int | None = None) -> None:
    """Write stopped.json: the run ended early and can be resumed. Some launchers lose the exit code."""
    if run.is_dir():  # else the run has not started
        write_json(run / STOPPED_FILE, {"why": why, **({} if step is None else {"step": step})})


def stop_error(signal: str, run: Path, step: int, first: bool, saved: bool = True) -> TextmillError:
    """The exception that ends a run which was stopped by a signal; only rank 0 reports it."""
    if not first:
        return AlreadyReported(EXIT_STOPPED)
    write_stopped_file(run, f"stopped by {signal}", step)
    state = "saved" if saved else "not saved, because its loss is not finite"
    return Interrupted(f"stopped by {signal} at step {step:,}, {state}; run the same command again to resume")


def run_and_exit(work: Callable[[], int]) -> NoReturn:
    """Run `work` and exit with the code that it returns; an unexpected exception prints its traceback.

    Exit handlers run and output is flushed, but the interpreter is not finalized: then a gloo thread that still
    holds a tensor would abort the process, and other threads could keep it from ending.
    """
    code = EXIT_BUG
    try:
        code = work()
    except Exception:
        sys.excepthook(*sys.exc_info())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the process is ending already
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
    os._exit(code)
