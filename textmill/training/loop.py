"""The training loop: it decides when to log, evaluate, save and stop; the engine computes the steps."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.engines import Engine, Step, open_ranks
from textmill.processes.command_time import CommandTime
from textmill.processes.ranks import run_on_all
from textmill.processes.signals import StopSignals, stop_error, write_stopped_file
from textmill.storage import faults
from textmill.storage.files import claim_folder, format_path
from textmill.storage.prefetch import prefetch
from textmill.storage.stages import Force
from textmill.tokens.batches.batch import Batch, corrupt_labels
from textmill.tokens.batches.by_step import Batches
from textmill.tokens.splits import Splits
from textmill.track import Trackers
from textmill.training.divergence import SkippedUpdates
from textmill.training.replica_check import check_replicas
from textmill.training.run_folder import checkpoint_files, open_run_folder, take_snapshot
from textmill.training.run_length import RunLength
from textmill.training.run_minutes import MinutesTimer
from textmill.training.sample_prompts import write_samples
from textmill.training.saving import agree_to_stop, open_saver
from textmill.training.setup import build_engine, complete_config, describe_end, prepare_run
from textmill.training.start import Start
from textmill.training.step_log import StepLog, describe_best
from textmill.training.token_check import TokenCheck
from textmill.training.valid_loss import Validation


def train(
    config: RunConfig, force: Force = "no", step: StepChoice = "latest", *,
    change: bool = False, command: CommandTime | None = None,
) -> Path:  # fmt: skip
    """Train to the last step, resuming from the newest checkpoint if there is one (`change`: with other settings)."""
    command, run = command or CommandTime(), config.folder_of("train")
    with (
        closing(open_ranks(config)) as ranks,
        ExitStack() as lock,
        ranks.under_watchdog(partial(write_stopped_file, run)),
        ExitStack() as resources,
    ):
        keep_folder = run_on_all(ranks, lambda: lock.enter_context(claim_folder(run, "train.folder", ranks.first)))
        config = run_on_all(ranks, lambda: complete_config(config, force, ranks))
        data, start, batches, run_length = run_on_all(ranks, lambda: prepare_run(config, force, step, change))
        if done := describe_end(config.train, start, run_length):
            if ranks.first:
                print(f"train: done already: {format_path(run)} ({done})")
            return run
        resolved = config.model_copy(update={"train": run_length.train})
        engine = run_on_all(ranks, lambda: build_engine(resolved, start, ranks, resources))
        run_on_all(ranks, keep_folder)
        with StopSignals() as stop_signals:
            Training(config, run_length, data, start, engine, stop_signals).run_steps(batches, command)
    return run


class Training:
    """A run in this process, from its start or resume to its end: the state that all steps share."""

    def __init__(
        self, config: RunConfig, length: RunLength, data: Splits, start: Start, engine: Engine, signals: StopSignals
    ) -> None:
        self.config, self.length, self.train, self.data, self.start = config, length, length.train, data, start
        self.engine, self.ranks, self.first, self.signals = engine, engine.ranks, engine.first, signals
        self.run, self.files = config.folder_of("train"), checkpoint_files(config, data, start)
        self.skipped_updates = SkippedUpdates(self.run, engine.guard, self.first)
        self.saver = open_saver(self.run, self.train, start.step, self.ranks)
        self.token_check = TokenCheck(self.run, data.files if self.first else {})
        self.validation = Validation(config, data, start, engine, length.sample_length)
        self.validation.tasks.check()

    def run_steps(self, batches: Batches, command: CommandTime) -> None:
        """Run all remaining steps."""
        open_folder = partial(open_run_folder, self.config, self.length, self.start, self.engine.facts())
        self.trackers = open_folder() if self.first else Trackers()
        self.step_log = StepLog(self.length, self.start.step, self._log)
        self.timer = MinutesTimer(command, self.start.step + 1, self.ranks, self.step_log, self.validation.costs)

        def read(step: int) -> Batch:
            return batches.batch_at(step, self.engine.samples_of(batches.sizes.size_at(step)))

        try:
            for step, batch in prefetch(read, range(self.start.step, self.length.steps)):
                if step == self.length.steps or self.validation.stops_early:
                    break
                self.ranks.report_progress(f"step {step + 1}")
                faults.break_process(step)
                batch = corrupt_labels(batch) if faults.is_due("spike", step) else batch
                self._after_step(step + 1, self.engine.train_step(batch, step, self.length.lr_at(step)))
            self.saver.wait()
            if self.first:
                self.trackers.note(describe_best(self.run))
        finally:
            self.saver.join()
            self.trackers.close()

    def _after_step(self, done: int, result: Step) -> None:
        """Log, check, evaluate, save and stop, as far as due after `done` steps."""
        self.step_log.flush()
        self.skipped_updates.add(done, result)
        length = self.length if self.length.known else self.timer.after_step(self.length, done, result)
        train, is_due, log = self.train, length.is_due, self.step_log
        self.trackers.advance(done)
        if result.note:
            self.trackers.note(f"step {done}: {result.note}")
        if done == 1 or is_due(train.log_every, done):
            log.add(done, result)
        if done == 1 or self.engine.guard or length is not self.length:  # a spike guard reports the latest step
            log.flush()
        if length is not self.length:
            self._change_length(length)
        check_replicas(self.ranks, self.engine, done, self.config.engine.check_replicas_every)
        self.metrics: dict[str, float] = {}
        if self.validation.is_due(length, done):
            with log.paused(result):
                self.metrics = self.validation.measure(length, done, self.trackers)
        stop_signal = agree_to_stop(self.ranks, self.signals, self.saver, self.token_check)
        if stop_signal or self.validation.stops_early or is_due(train.save_every, done):
            with log.paused(result):
                saved = self._save(done, result)
        if stop_signal and done < self.length.steps:
            self.saver.wait()
            raise stop_error(stop_signal, self.run, done, self.first, saved)

    def _log(self, done: int, result: Step, tokens_per_second: float) -> None:
        values = {"loss": result.loss, **result.terms, **self.length.metrics_of(done), "grad_norm": result.norm}
        bits, skipped = self.validation.train_bits(result.loss), self.skipped_updates.metrics(result)
        self.trackers.log(done, values | bits | {"tokens_per_second": tokens_per_second} | skipped)
        self.skipped_updates.check(done, result, self.trackers)

    def _change_length(self, length: RunLength) -> None:
        """`train.minutes`: use a new estimate of the number of steps, or the final number."""
        self.length, self.train = length, length.train
        if length.known:
            self.trackers.set_steps(length.steps)
            self.trackers.note(f"train: {length.describe()}")

    def _save(self, done: int, result: Step) -> bool:
        """Save, unless the loss is not finite; the last save waits until the token files are checked."""
        loss, metrics, best = result.loss, self.metrics, self.validation.best
        last = done == self.length.steps or self.validation.stops_early
        if self.skipped_updates.refuses_save(done, loss, metrics, last=last, trackers=self.trackers):
            return False
        if last:
            run_on_all(self.ranks, lambda: self.token_check.wait(self.ranks, self.signals))
        self.saver.save(take_snapshot(self.engine, done, self.start, self.length, loss, metrics, best, self.files))
        self.trackers.note(f"step {done}: saving {format_path(self.run / f'step-{done:07d}')}")
        if self.train.sample_prompts:
            self.saver.wait()
            for line in write_samples(self.config, self.run / f"step-{done:07d}", done) if self.first else ():
                self.trackers.note(line)
        return True
