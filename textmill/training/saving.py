"""Saver: checkpoints written beside training, one at a time, by all processes of a run together."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import Snapshot, find_checkpoint_damage, prune, write_checkpoint
from textmill.errors import Interrupted
from textmill.processes.ranks import SINGLE_PROCESS, Ranks
from textmill.processes.signals import StopSignals


class Saver:
    """Writes checkpoints in a thread; the processes agree there over a group that nothing else uses."""

    def __init__(self, run: Path, *, keep: int, keep_every: int | None, ranks: Ranks = SINGLE_PROCESS) -> None:
        self.run, self.ranks = run, ranks
        self._prune = partial(prune, run, keep=keep, keep_every=keep_every)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Begin writing; waits for the save before it, and raises what went wrong there."""
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
        """Whether something went wrong that `wait` will raise; never waits."""
        return self._error is not None

    def join(self) -> None:
        """Wait until the save under way is over."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Wait until the save under way is over; raise what went wrong in it."""
        self.join()
        if (error := self._error) is not None:
            self._error = None
            if isinstance(error, OSError):
                reason = f"a checkpoint could not be written ({error.strerror}); those before it are whole"
                raise Interrupted(f"{self.run}: {reason}; make room and run again") from None
            raise error


def agree_to_stop(ranks: Ranks, stopping: StopSignals, saver: Saver) -> str | None:
    """The signal that any process has heard, so that all stop after the same step; a save that failed ends all of them here."""
    if not ranks.any(stopping.received is not None or saver.failed):
        return None
    signals, failures = zip(*ranks.all_gather([stopping.received, saver.failed]), strict=True)
    if any(failures):
        saver.wait()
    return next(filter(None, signals), None)
