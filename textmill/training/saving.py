"""Saver: writes checkpoints in a background thread while training continues, one at a time, on all ranks together."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import numpy as np

from textmill.checkpoints.folders import find_checkpoint_damage
from textmill.checkpoints.pruning import prune
from textmill.checkpoints.writing import Snapshot, write_checkpoint
from textmill.config import TrainConfig
from textmill.errors import AlreadyReported, Interrupted, TextmillError
from textmill.processes.ranks import SINGLE_PROCESS, Ranks, run_on_all
from textmill.processes.signals import StopSignals
from textmill.training.run_folder import remove_replaced
from textmill.training.token_check import TokenCheck


class Saver:
    """Writes checkpoints in a thread; `ranks` must be a process group that nothing else uses.

    Checkpoints after step `start` are of the run before it went back to `start`; the first save removes them.
    """

    def __init__(
        self, run: Path, *, keep: int, keep_every: int | None, ranks: Ranks = SINGLE_PROCESS, start: int | None = None
    ) -> None:
        self.run = run
        self.ranks = ranks
        self._branch_start = start
        self._prune = partial(prune, run, keep=keep, keep_every=keep_every)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, snapshot: Snapshot) -> Path:
        """Start writing and return the future folder; first waits for the previous save and raises its error."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(snapshot,), name="save")
        self._thread.start()
        return self.run / f"step-{snapshot.step:07d}"

    def _write(self, snapshot: Snapshot) -> None:
        try:
            if self.ranks.any(not all(np.isfinite(values).all() for _, values in snapshot.weights)):
                self._raise_not_finite(snapshot.step)
            folder = write_checkpoint(self.run, snapshot, self.ranks)
            if self.ranks.first and not find_checkpoint_damage(folder, deep=False):
                if self._branch_start is not None:
                    remove_replaced(self.run, self._branch_start, snapshot.step)
                    self._branch_start = None
                self._prune()
        except BaseException as error:
            self._error = error

    def _raise_not_finite(self, step: int) -> None:
        reason = f"step {step} is not saved: a weight is not finite; earlier checkpoints are kept"
        advice = "lower train.learning_rate and start from scratch with --force, or choose another train.folder"
        error = TextmillError(f"{self.run}: diverged: {reason}; {advice}")
        raise error if self.ranks.first else AlreadyReported(error.exit_code)

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


def open_saver(run: Path, train: TrainConfig, start: int, ranks: Ranks) -> Saver:
    """The saver of a run that starts or resumes at step `start`, over a process group of its own."""
    rule = train.checkpoints
    return Saver(run, keep=rule.keep, keep_every=rule.keep_every, ranks=ranks.new_group(), start=start)


def agree_to_stop(ranks: Ranks, stop_signals: StopSignals, saver: Saver, token_check: TokenCheck) -> str | None:
    """The stop signal that any rank received, so that all stop after the same step; raises if a save or a check of the
    token files failed."""
    if not ranks.any(stop_signals.received is not None or saver.failed or token_check.failed):
        return None
    states = ranks.all_gather([stop_signals.received, saver.failed, token_check.failed])
    signals, failures, damages = zip(*states, strict=True)
    if any(damages):
        run_on_all(ranks, token_check.raise_error)
    if any(failures):
        saver.wait()
    return next(filter(None, signals), None)
