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
from textmill.tokens.batches.batch import Batch, inject_spike
from textmill.tokens.batches.loader import Batches
from textmill.tokens.splits import Splits
from textmill.track import Trackers
from textmill.training.divergence import SkippedUpdates
from textmill.training.replica_check import check_replicas
from textmill.training.run_folder import RunState, checkpoint_files, open_run_folder, take_snapshot
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
    config: RunConfig,
    force: Force = "no",
    step: StepChoice = "latest",
    *,
    change: bool = False,
    command: CommandTime | None = None,
) -> Path:
    """Train to the last step, resuming from the newest checkpoint if there is one (`change`: with other settings)."""
    command = command or CommandTime()
    run = config.folder_of("train")
    with (
        closing(open_ranks(config.engine)) as ranks,
        ExitStack() as lock,
        ranks.under_watchdog(partial(write_stopped_file, run)),
        ExitStack() as resources,
    ):
        keep_folder = run_on_all(ranks, lambda: lock.enter_context(claim_folder(run, "train.folder", ranks.first)))
        config = run_on_all(ranks, lambda: complete_config(config, force, ranks))
        data, start, batches, run_length = run_on_all(ranks, lambda: prepare_run(config, force, step, change))
        if reason := describe_end(config.train, start, run_length):
            if ranks.first:
                print(f"train: done already: {format_path(run)} ({reason})")
            return run
        with_steps = config.model_copy(update={"train": run_length.longest})
        engine = run_on_all(ranks, lambda: build_engine(with_steps, start, ranks, resources))
        run_on_all(ranks, keep_folder)  # from here on a failed run leaves its folder
        with StopSignals() as stop_signals:
            Training(config, run_length, data, start, engine, stop_signals).run_steps(batches, command)
    return run


class Training:
    """A run in this process, from its start or resume to its end: the state that all steps share."""

    def __init__(
        self, config: RunConfig, run_length: RunLength, data: Splits, start: Start, engine: Engine, signals: StopSignals
    ) -> None:
        self.config = config
        self.start = start
        self.engine = engine
        self.signals = signals
        self.ranks = engine.ranks
        self.first = engine.first
        self.run, self.files = config.folder_of("train"), checkpoint_files(config, data, start)
        self.run_length = run_length
        """`train.minutes`: replaced by a new estimate of the number of steps, then by the final number."""
        self.skipped_updates = SkippedUpdates(self.run, engine.guard, self.first)
        self.saver = open_saver(self.run, run_length.train, start.step, self.ranks)
        self.token_check = TokenCheck(self.run, data.files if self.first else {})
        self.validation = Validation(config, data, start, engine, run_length.sample_length)
        self.validation.tasks.check()

    def run_steps(self, batches: Batches, command: CommandTime) -> None:
        """Run all remaining steps."""
        open_folder = partial(open_run_folder, self.config, self.run_length, self.start, self.engine.facts())
        self.trackers = open_folder() if self.first else Trackers()
        self.step_log = StepLog(self.run_length, self.start.step, self._log)
        self.timer = MinutesTimer(command, self.start.step + 1, self.ranks, self.step_log, self.validation.costs)

        def read(step: int) -> Batch:
            return batches.batch_at(step, self.engine.samples_of(batches.sizes.size_at(step)))

        try:
            for step, batch in prefetch(read, range(self.start.step, self.run_length.steps)):
                if step == self.run_length.steps or self.validation.stops_early:
                    break
                self.ranks.report_progress(f"step {step + 1}")
                faults.break_process(step)
                batch = self.run_length.with_multi_token_weight(inject_spike(batch, step), step)
                self._after_step(step + 1, self.engine.train_step(batch, step, self.run_length.lr_at(step)))
            self.saver.wait()
            if self.first:
                self.trackers.note(describe_best(self.run))
        finally:
            self.saver.join()
            self.trackers.close()

    def _after_step(self, done: int, result: Step) -> None:
        """Log, check, evaluate, save and stop, as far as due after `done` steps."""
        log = self.step_log
        train = self.config.train
        run_length = self.run_length
        log.flush()
        self.skipped_updates.add(done, result)
        if not run_length.known:
            run_length = self.timer.after_step(run_length, done, result)
        is_new_length = run_length is not self.run_length
        self.trackers.advance(done)
        if result.note:
            self.trackers.note(f"step {done}: {result.note}")
        if done == 1 or run_length.is_due(train.log_every, done):
            log.add(done, result)
        if done == 1 or self.engine.guard or is_new_length:  # a spike guard reports the latest step
            log.flush()
        if is_new_length:
            self.run_length = run_length
            if run_length.known:
                self.trackers.set_steps(run_length.steps)
                self.trackers.note(f"train: {run_length.describe()}")
        check_replicas(self.ranks, self.engine, done, self.config.engine.check_replicas_every)
        metrics: dict[str, float] = {}
        if self.validation.is_due(run_length, done):
            with log.paused(result):
                metrics = self.validation.measure(run_length, done, self.trackers)
        stop_signal = agree_to_stop(self.ranks, self.signals, self.saver, self.token_check)
        if stop_signal or self.validation.stops_early or run_length.is_due(train.save_every, done):
            with log.paused(result):
                saved = self._save(done, result, metrics)
        if stop_signal and done < run_length.steps:
            self.saver.wait()
            raise stop_error(stop_signal, self.run, done, self.first, saved)

    def _log(self, done: int, result: Step, tokens_per_second: float) -> None:
        values = {"loss": result.loss, **result.terms, **self.run_length.metrics_of(done), "grad_norm": result.norm}
        values |= self.validation.train_bits(result.loss) | {"tokens_per_second": tokens_per_second}
        self.trackers.log(done, values | self.skipped_updates.metrics(result))
        self.skipped_updates.check(done, result, self.trackers)

    def _save(self, done: int, result: Step, metrics: dict[str, float]) -> bool:
        """Save, unless the loss is not finite; the last save waits until the token files are checked."""
        last = done == self.run_length.steps or self.validation.stops_early
        if self.skipped_updates.refuses_save(done, result.loss, metrics, last=last, trackers=self.trackers):
            return False
        if last:
            run_on_all(self.ranks, lambda: self.token_check.wait(self.ranks, self.signals))
        state = RunState(done, self.start, self.run_length, result.loss, metrics, self.validation.best)
        folder = self.saver.save(take_snapshot(self.engine, state, self.files))
        self.trackers.note(f"step {done}: saving {format_path(folder)}")
        if self.config.train.sample_prompts:
            self.saver.wait()
            for line in write_samples(self.config, folder, done) if self.first else ():
                self.trackers.note(line)
        return True
