"""The one loop: batches in, checkpoints and metrics out; what and when is decided here, how is the engine's."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.engines import Engine, Step, Sums, open_engine, open_ranks
from textmill.processes.ranks import Ranks, report_each, run_on_all
from textmill.processes.signals import StopSignals, stop_error, write_stopped_file
from textmill.schedules import lr_at
from textmill.storage import faults
from textmill.storage.files import claim_folder, format_path, write_text
from textmill.storage.prefetch import prefetch
from textmill.storage.stages import Force
from textmill.tokens.batches.batch import garbled
from textmill.tokens.batches.by_step import Batches
from textmill.tokens.batches.from_config import open_batches, valid_batches
from textmill.tokens.splits import Splits, open_splits
from textmill.track import Trackers
from textmill.training.divergence import SkippedUpdates
from textmill.training.replica_check import check_replicas
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.runs import INDEX, Start, begin, files_of, make_room, snapshot_of, trackers_of
from textmill.training.sample_prompts import write_samples
from textmill.training.saving import Saver, agree_to_stop
from textmill.training.step_log import StepLog, describe_best


def train(config: RunConfig, force: Force = "no", step: StepChoice = "latest") -> Path:
    """Train from the newest checkpoint, or from the beginning, to the last step; return the run's folder."""
    run = config.folder_of("train")
    with (
        closing(open_ranks(config)) as ranks,
        ExitStack() as folder,
        ranks.under_watchdog(partial(write_stopped_file, run)),
        ExitStack() as held,
    ):
        keep = run_on_all(ranks, lambda: folder.enter_context(claim_folder(run, "train.folder", ranks.first)))
        data, start, batches, course = run_on_all(ranks, lambda: _begun(config, force, step))
        if start.step >= course.steps:
            if ranks.first:
                print(f"train: done already: {format_path(run)} (step {start.step:,})")
            return run
        engine = run_on_all(
            ranks, lambda: _loaded(config.model_copy(update={"train": course.train}), start, ranks, held)
        )
        run_on_all(ranks, keep)
        with StopSignals() as stopping:
            Training(config, course, data, start, engine, stopping).go(batches)
    return run


def _begun(config: RunConfig, force: Force, step: StepChoice) -> tuple[Splits, Start, Batches, RunLength]:
    """All that is known before the engine."""
    faults.break_process("start")
    data = open_splits(config)
    start = begin(config, data, force, step)
    length = config.train.length or start.shape.positions
    batches = open_batches(config.train, data, length=length, folder=config.folder_of("train") / INDEX)
    return data, start, batches, plan_run_length(config.train, batches, length)


def _loaded(config: RunConfig, start: Start, ranks: Ranks, held: ExitStack) -> Engine:
    """An engine that holds what the run starts from."""
    engine = open_engine(config, start.shape, ranks)
    held.callback(engine.close)
    engine.load(
        report_each(ranks, start.weights), report_each(ranks, start.moments), start.updates, start.where, start.scaling
    )
    if engine.guard:
        engine.guard.take(start.spikes)
    return engine


class Training:
    """One sitting of a run: what must be at hand from step to step."""

    def __init__(
        self, config: RunConfig, course: RunLength, data: Splits, start: Start, engine: Engine, stopping: StopSignals
    ) -> None:
        self.config, self.course, self.train, self.data, self.start = config, course, course.train, data, start
        self.engine, self.ranks, self.first, self.stopping = engine, engine.ranks, engine.first, stopping
        self.run, self.files = config.folder_of("train"), files_of(config, data, start)
        self.patience = SkippedUpdates(self.run, engine.guard, self.first)
        kept = self.train.checkpoints
        self.saver = Saver(self.run, keep=kept.keep, keep_every=kept.keep_every, ranks=self.ranks.new_group())
        self.valid_loss: float | None = None

    def go(self, batches: Batches) -> None:
        """All steps that are left."""
        if self.first:
            make_room(self.run, self.start.step)
            write_text(self.run / "run.yaml", self.config.to_yaml())
        self.trackers = (
            trackers_of(self.config, self.course, self.start, self.engine.facts()) if self.first else Trackers()
        )
        self.book = StepLog(self.course, self.start.step, self._log)
        read = lambda step: batches.batch_at(step, self.engine.samples_of(batches.sizes.at(step)))  # noqa: E731
        try:
            for step, batch in prefetch(read, range(self.start.step, self.course.steps)):
                self.ranks.report_progress(f"step {step + 1}")
                faults.break_process(step)
                batch = garbled(batch) if faults.is_due("spike", step) else batch
                self._after(step + 1, self.engine.train_step(batch, step, lr_at(step, self.train)))
            self.saver.wait()
            if self.first:
                self.trackers.note(describe_best(self.run))
        finally:
            self.saver.join()
            self.trackers.close()

    def _after(self, done: int, result: Step) -> None:
        """What is due after so many steps: log, evaluate, save, stop."""
        train, due, last, book = self.train, self.course.due, done == self.course.steps, self.book
        book.write()
        if result.news:
            self.trackers.note(f"step {done}: {result.news}")
        if done == 1 or due(train.log_every, done):
            book.enter(done, result)
        if done == 1 or self.engine.guard:  # the first is waited for; a guard speaks of the last step there is
            book.write()
        check_replicas(self.ranks, self.engine, done, self.config.engine.check_replicas_every)
        self.valid_loss = None
        if due(train.evaluate_every, done):
            with book.paused(result):
                self.valid_loss = self._evaluate(done)
        asked = agree_to_stop(self.ranks, self.stopping, self.saver)
        if asked or due(train.save_every, done):
            with book.paused(result):
                self._save(done, result)
        if asked and not last:
            self.saver.wait()
            raise stop_error(asked, self.run, done, self.first)

    def _log(self, done: int, result: Step, rate: float) -> None:
        values = {
            "loss": result.loss,
            "learning_rate": lr_at(done - 1, self.train),
            "grad_norm": result.norm,
            "tokens_per_second": rate,
        }
        self.trackers.log(done, values | self.patience.numbers(result))
        self.patience.look(done, result, self.trackers)

    def _evaluate(self, done: int) -> float | None:
        whole = valid_batches(self.train, self.data, length=self.course.length, folder=self.run / INDEX)
        batches = itertools.islice(whole, self.train.evaluate_batches)
        sums = sum((self.engine.eval_step(batch) for batch in batches), Sums(0.0, 0, 0))
        if not sums.asked:
            return None
        loss = sums.loss / sums.asked
        self.trackers.log(done, {"valid_loss": loss, "valid_accuracy": sums.correct / sums.asked})
        return loss

    def _save(self, done: int, result: Step) -> None:
        self.saver.save(
            snapshot_of(self.engine, done, self.start, self.course, result.loss, self.valid_loss, self.files)
        )
        self.trackers.note(f"step {done}: saving {format_path(self.run / f'step-{done:07d}')}")
        if self.train.sample_prompts:
            self.saver.wait()
            for line in write_samples(self.config, self.run / f"step-{done:07d}", done) if self.first else ():
                self.trackers.note(line)
