"""Saver: writes checkpoints in a background thread while training continues, one at a time, on all ranks together."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import Snapshot, find_checkpoint_damage, prune, write_checkpoint
from textmill.errors import Interrupted
from textmill.processes.ranks import SINGLE_PROCESS, Ranks
from textmill.processes.signals import StopSignals


class Saver:
    """Writes checkpoints in a thread; `ranks` must be a process group that nothing else uses."""

    def __init__(self, run: Path, *, keep: int, keep_every: int | None, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.run, self.ranks = run, ranks
        self._prune = partial(prune, run, keep=keep, keep_every=keep_every)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Start writing; first waits for the previous save and raises its error, if it failed."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="save")
        self._thread.start()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            folder = write_checkpoint(self.run, snapshot, self.ranks)
            if self.ranks.first and not find_checkpoint_damage(folder, deep=False):
                self._prune()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether a save has failed and `wait` will raise its error; does not wait."""
        return self._error is not None

    def join(self) -> None:
        """Wait for the running save."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait for the running save; raise its error, if it failed."""
        self.join()
        if (error := self._error) is not None:
            self._error = None
            if isinstance(error, OSError):
                reason = f"cannot write a checkpoint ({error.strerror}); earlier checkpoints are intact"
                raise Interrupted(f"{self.run}: {reason}; free some disk space and run the command again") from None
            raise error


def agree_to_stop(ranks: Ranks, stop_signals: StopSignals, saver: Saver) -> str | None:
    """The stop signal that any rank received, so that all stop after the same step; raises if a save failed."""
    if not ranks.any(stop_signals.received is not None or saver.failed):
        return None
    signals, failures = zip(*ranks.all_gather([stop_signals.received, saver.failed]), strict=True)
    if any(failures):
        saver.wait()
    return next(filter(None, signals), None)
