"""The training loop: it decides when to log, evaluate, save and stop; the engine computes the steps."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.engines import Engine, Step, Sums, open_ranks
from textmill.processes.ranks import run_on_all
from textmill.processes.signals import StopSignals, stop_error, write_stopped_file
from textmill.schedules import lr_at
from textmill.storage import faults
from textmill.storage.files import claim_folder, format_path, write_text
from textmill.storage.prefetch import prefetch
from textmill.storage.stages import Force
from textmill.tokens.batches.batch import Batch, corrupt_labels
from textmill.tokens.batches.by_step import Batches
from textmill.tokens.batches.from_config import valid_batches
from textmill.tokens.splits import Splits
from textmill.track import Trackers
from textmill.training.divergence import SkippedUpdates
from textmill.training.replica_check import check_replicas
from textmill.training.run_folder import (
    INDEX_FOLDER,
    checkpoint_files,
    clean_run_folder,
    open_run_trackers,
    take_snapshot,
)
from textmill.training.run_length import RunLength
from textmill.training.sample_prompts import write_samples
from textmill.training.saving import Saver, agree_to_stop
from textmill.training.setup import build_engine, prepare_run
from textmill.training.start import Start
from textmill.training.step_log import StepLog, describe_best


def train(config: RunConfig, force: Force = "no", step: StepChoice = "latest") -> Path:
    """Train to the last step, resuming from the newest checkpoint if there is one; return the run folder."""
    run = config.folder_of("train")
    with (
        closing(open_ranks(config)) as ranks,
        ExitStack() as folder_lock,
        ranks.under_watchdog(partial(write_stopped_file, run)),
        ExitStack() as resources,
    ):
        keep_folder = run_on_all(
            ranks, lambda: folder_lock.enter_context(claim_folder(run, "train.folder", ranks.first))
        )
        data, start, batches, run_length = run_on_all(ranks, lambda: prepare_run(config, force, step))
        if start.step >= run_length.steps:
            if ranks.first:
                print(f"train: done already: {format_path(run)} (step {start.step:,})")
            return run
        resolved = config.model_copy(update={"train": run_length.train})
        engine = run_on_all(ranks, lambda: build_engine(resolved, start, ranks, resources))
        run_on_all(ranks, keep_folder)
        with StopSignals() as stop_signals:
            Training(config, run_length, data, start, engine, stop_signals).run_steps(batches)
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
        rule = self.train.checkpoints
        self.saver = Saver(self.run, keep=rule.keep, keep_every=rule.keep_every, ranks=self.ranks.new_group())
        self.valid_loss: float | None = None

    def run_steps(self, batches: Batches) -> None:
        """Run all remaining steps."""
        self.trackers = Trackers()
        if self.first:
            clean_run_folder(self.run, self.start.step)
            write_text(self.run / "run.yaml", self.config.to_yaml())
            self.trackers = open_run_trackers(self.config, self.length, self.start, self.engine.facts())
        self.step_log = StepLog(self.length, self.start.step, self._log)

        def read(step: int) -> Batch:
            return batches.batch_at(step, self.engine.samples_of(batches.sizes.size_at(step)))

        try:
            for step, batch in prefetch(read, range(self.start.step, self.length.steps)):
                self.ranks.report_progress(f"step {step + 1}")
                faults.break_process(step)
                batch = corrupt_labels(batch) if faults.is_due("spike", step) else batch
                self._after_step(step + 1, self.engine.train_step(batch, step, lr_at(step, self.train)))
            self.saver.wait()
            if self.first:
                self.trackers.note(describe_best(self.run))
        finally:
            self.saver.join()
            self.trackers.close()

    def _after_step(self, done: int, result: Step) -> None:
        """Log, check, evaluate, save and stop, as far as due after `done` steps."""
        train, is_due, log = self.train, self.length.is_due, self.step_log
        log.flush()
        if result.news:
            self.trackers.note(f"step {done}: {result.news}")
        if done == 1 or is_due(train.log_every, done):
            log.add(done, result)
        if done == 1 or self.engine.guard:  # wait for the first step; a spike guard reports the latest one
            log.flush()
        check_replicas(self.ranks, self.engine, done, self.config.engine.check_replicas_every)
        self.valid_loss = None
        if is_due(train.evaluate_every, done):
            with log.paused(result):
                self.valid_loss = self._evaluate(done)
        stop_signal = agree_to_stop(self.ranks, self.signals, self.saver)
        if stop_signal or is_due(train.save_every, done):
            with log.paused(result):
                self._save(done, result)
        if stop_signal and done < self.length.steps:
            self.saver.wait()
            raise stop_error(stop_signal, self.run, done, self.first)

    def _log(self, done: int, result: Step, tokens_per_second: float) -> None:
        values = {
            "loss": result.loss,
            "learning_rate": lr_at(done - 1, self.train),
            "grad_norm": result.norm,
            "tokens_per_second": tokens_per_second,
        }
        self.trackers.log(done, values | self.skipped_updates.metrics(result))
        self.skipped_updates.check(done, result, self.trackers)

    def _evaluate(self, done: int) -> float | None:
        all_batches = valid_batches(
            self.train, self.data, length=self.length.sample_length, folder=self.run / INDEX_FOLDER
        )
        batches = itertools.islice(all_batches, self.train.evaluate_batches)
        sums = sum((self.engine.eval_step(batch) for batch in batches), Sums(0.0, 0, 0))
        if not sums.asked:
            return None
        loss = sums.loss / sums.asked
        self.trackers.log(done, {"valid_loss": loss, "valid_accuracy": sums.correct / sums.asked})
        return loss

    def _save(self, done: int, result: Step) -> None:
        engine, start, loss = self.engine, self.start, result.loss
        self.saver.save(take_snapshot(engine, done, start, self.length, loss, self.valid_loss, self.files))
        self.trackers.note(f"step {done}: saving {format_path(self.run / f'step-{done:07d}')}")
        if self.train.sample_prompts:
            self.saver.wait()
            for line in write_samples(self.config, self.run / f"step-{done:07d}", done) if self.first else ():
                self.trackers.note(line)
