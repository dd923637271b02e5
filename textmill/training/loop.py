"""The training loop: it decides when to log, evaluate, save and stop; the engine computes the steps.

`open_training` locks the run folder, opens the data, chooses what to start from and builds the engine. `Training` is
the loop: a caller iterates over its steps and runs each, and `Training._after_step` does what is due after it: log,
check, evaluate, save, stop. `train` runs every step as the settings say; a researcher's own loop does other things.
"""

from __future__ import annotations

import difflib
import json
import math
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textmill.checkpoints.best import VALID_LOSS, BestRule, open_best_step, read_metric
from textmill.checkpoints.folders import BEST_LINK, StepChoice, list_checkpoints, open_checkpoint, read_best_values
from textmill.config import RunConfig, TrainConfig
from textmill.config.own_files import is_own_file, last_own_file
from textmill.engines import Engine, Step, open_engine, open_ranks
from textmill.engines.distillation import check_teachers, resolve_teachers
from textmill.errors import TextmillError
from textmill.generation import sample_prompts
from textmill.models import open_family
from textmill.models.family_files import find_family_file
from textmill.processes.ranks import Ranks, report_each, run_on_all
from textmill.processes.signals import StopSignals, stop_error, write_stopped_file
from textmill.storage import faults
from textmill.storage.files import claim_folder, find_damage, format_path, read_json, write_json
from textmill.storage.prefetch import prefetch
from textmill.storage.stages import Force
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.loader import Batches, open_batches
from textmill.tokens.splits import Splits, open_splits
from textmill.track import Trackers
from textmill.track.jsonl import METRICS_FILE, JsonLines
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.changing import data_ranges
from textmill.training.divergence import SkippedUpdates, compare_ranks
from textmill.training.run_folder import (
    INDEX_FOLDER,
    SAMPLES_FILE,
    RunState,
    Saver,
    checkpoint_files,
    open_run_folder,
    open_saver,
    take_snapshot,
)
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.start import (
    Start,
    check_batch_memory,
    check_own_code,
    choose_start,
    own_parts,
    use_imported_model,
)
from textmill.training.timing import MinutesTimer, StepLog
from textmill.training.validation import Validation

if TYPE_CHECKING:
    from torch import Tensor

    from textmill.engines.micro_batches import MicroBatch
    from textmill.models.base_torch import BaseNet

CHECKED_FILE = "tokens_checked.json"
"""The files that were found intact, with length and modification time: a resumed run does not read them again."""
LOG_OUTSIDE = "log: metrics belong to a step; call run.log inside the loop over the steps"
POLL_SECONDS = 0.2
OVERFITTING_RATIO = 1.005
"""Overfitting is reported if the last valid loss is above the lowest one by this factor."""


def train(
    config: RunConfig,
    force: Force = "no",
    step: StepChoice = "latest",
    *,
    change: bool = False,
    started: float | None = None,
    evaluates: bool = False,
) -> Path:
    """Train to the last step, resuming from the newest checkpoint if there is one (`change`: with other settings).

    `train.minutes` counts from `started`, by `time.perf_counter`, and leaves time to evaluate if the command
    `evaluates` after training.
    """
    with open_training(config, force, step, change=change, started=started, evaluates=evaluates) as run:
        for training_step in run:
            training_step.run()
    return config.folder_of("train")


@contextmanager
def open_training(
    config: RunConfig,
    force: Force = "no",
    step: StepChoice = "latest",
    *,
    change: bool = False,
    started: float | None = None,
    evaluates: bool = False,
) -> Iterator[Training | DoneTraining]:
    """A run to iterate over, from its newest checkpoint on; the arguments are those of `train`."""
    started = time.perf_counter() if started is None else started
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
        own_code = partial(check_own_code, config.model, config.train, start.shape, config.engine)
        run_on_all(ranks, lambda: own_code() if ranks.first else None)
        if reason := describe_end(config.train, start, run_length):
            if ranks.first:
                print(f"train: done already: {format_path(run)} ({reason})")
            yield DoneTraining(run)
            return
        new_engine = partial(
            open_engine, config.engine, run_length.train_with_all_steps, start.shape, config.model.lora, ranks
        )
        engine = run_on_all(ranks, lambda: resources.enter_context(closing(new_engine())))
        run_on_all(ranks, lambda: load_start(engine, start))
        run_on_all(ranks, keep_folder)  # from here on a failed run leaves its folder
        with StopSignals() as stop_signals:
            training = Training(config, run_length, data, start, engine, stop_signals)
            with closing(training.run_steps(batches, started, evaluates)) as training.steps:
                yield training


def complete_config(config: RunConfig, force: Force, ranks: Ranks) -> RunConfig:
    """The config with folders in place of an imported model and of teachers, and with what `train.preset=auto` sets."""
    open_family(config.model.family)  # a file of the user's own, before any checkpoint that needs it is read
    config = use_imported_model(config, write=ranks.first)
    config = config.model_copy(update={"train": resolve_teachers(config.train)})
    return fill_auto_preset(config, force, ranks.world)


def prepare_run(
    config: RunConfig, force: Force, step: StepChoice, change: bool = False
) -> tuple[Splits, Start, Batches, RunLength]:
    """Open the data, choose what to start from, and compute the length of the run."""
    faults.break_process("start")
    data = open_splits(config)
    check_teachers(config.train.distil, config.engine, config.model, data.tokenizer)
    start = replace(choose_start(config, data, force, step, change), sources=data.sources)
    length = config.train.length or start.shape.positions
    check_batch_memory(config.train, length)
    folder = config.folder_of("train") / INDEX_FOLDER
    history = data_ranges(start.ranges)
    batches = open_batches(config.train, data, length=length, folder=folder, history=history)
    run_length = plan_run_length(config.train, batches.sizes, batches.samples_per_epoch, length, start.run_length)
    if start.changed_now and start.step >= run_length.steps:
        limit = f"train.{config.train.unit}" + (" or train.max_epochs" if config.train.max_epochs else "")
        raise TextmillError(
            f"--change: {config.folder_of('train')} is at its last step, {start.step:,}; set a higher {limit} to "
            "train on with the new settings"
        )
    return data, start, batches, run_length


def describe_end(train: TrainConfig, start: Start, length: RunLength) -> str | None:
    """Why there is no step left to run: the checkpoint is at the last one, or the run ended early; None if there is."""
    if start.step >= length.steps:
        return f"step {start.step:,}"
    best = open_best_step(train.best, start.best)
    return f"step {start.step:,}: {best.describe()}" if best.is_over(train.best.patience) else None


def load_start(engine: Engine, start: Start) -> None:
    """Load the weights and optimizer state that the run starts from."""
    weights = report_each(engine.ranks, start.weights)
    optimizer_state = report_each(engine.ranks, start.optimizer_state)
    engine.load(weights, optimizer_state, start.updates, start.source, start.loss_scale)


@dataclass(frozen=True)
class DoneTraining:
    """A run that has no step left."""

    folder: Path

    def __iter__(self) -> Iterator[TrainingStep]:
        return iter(())

    def log(self, **_metrics: float | Tensor) -> None:
        """Raises an error: there is no step that metrics could be of."""
        raise TextmillError(LOG_OUTSIDE)

    def capture(self, _name: str) -> AbstractContextManager[list[Any]]:
        """Raises an error: no net is loaded."""
        raise TextmillError("capture: the run is done, so no net is loaded; use textmill.open(RUN).capture(...)")


class Training:
    """A run in this process, from its start or resume to its end: the state that all steps share.

    Iterate over it to get its remaining steps. Each must be computed before the next one is taken: `step.run()`, or a
    loop over its micro-batches.
    """

    steps: Generator[TrainingStep]

    def __init__(
        self, config: RunConfig, run_length: RunLength, data: Splits, start: Start, engine: Engine, signals: StopSignals
    ) -> None:
        self.config = config
        self.start = start
        self.engine = engine
        self.signals = signals
        self.ranks = engine.ranks
        self.first = engine.first
        self.folder = config.folder_of("train")
        self.done = start.step
        """Steps done."""
        self.has_own_loss = is_own_file(config.train.loss)
        """Whether the loss is, or was in this process, another one than the settings describe: it has no perplexity."""
        self.slowest_rank: dict[str, float] = {}
        """What the last save measured, for the next logged step."""
        self.is_running = False
        """Whether the loop over the steps has begun and not ended."""
        own_files = own_parts(config.train, last_own_file)
        if (family := find_family_file(start.shape.family)) is not None:
            own_files["model.family"] = family
        self.files = checkpoint_files(start, config.model.lora, data.tokenizer, config.to_yaml(), own_files)
        self.run_length = run_length
        """`train.minutes`: replaced by every new estimate of the number of steps."""
        self.skipped_updates = SkippedUpdates(self.folder, self.first, engine.describe()["precision"])
        self.saver = open_saver(self.folder, run_length.train, start.step, self.ranks)
        self.token_check = TokenCheck(self.folder, data.files if self.first else {})
        self.validation = Validation(config, data, start, engine, run_length.sample_length)
        self.validation.tasks.check()

    def __iter__(self) -> Iterator[TrainingStep]:
        return self.steps

    def log(self, **metrics: float | Tensor) -> None:
        """Log metrics of the last step, or of the one that is being computed, in the first process."""
        if not self.is_running:
            raise TextmillError(LOG_OUTSIDE)
        self.trackers.log(self.done, {name: float(value) for name, value in metrics.items()})

    @contextmanager
    def capture(self, name: str) -> Iterator[list[Any]]:
        """The outputs of a module of the net, such as "blocks.3.attention", from the passes inside the `with` block."""
        engine: Any = self.engine
        if (net := getattr(engine, "net", None)) is None or getattr(engine, "compiled", None):
            raise TextmillError(
                "capture: needs the torch engine and a net that is not compiled; set engine.compile=false"
            )
        engine.graphs = None
        with capture_outputs(net, name) as outputs:
            yield outputs

    def _note_mixture(self, run_length: RunLength) -> None:
        """Print how often each source is repeated, if the sources have weights."""
        samples = run_length.samples_after(run_length.steps) if run_length.known else 0
        if samples and (mixture := self.batches.describe_mixture(samples)):
            self.trackers.note(f"train: {mixture}")

    def run_steps(self, batches: Batches, started: float, evaluates: bool) -> Generator[TrainingStep]:
        """The remaining steps; after each comes what is due."""
        description = self.engine.describe()
        self.batches = batches
        self.trackers = (
            open_run_folder(self.config, self.run_length, self.start, description) if self.first else Trackers()
        )
        self._note_mixture(self.run_length)
        self.step_log = StepLog(self.run_length, self.start.step, self._log)
        first = None if self.run_length.known else self.start.step + 1
        self.timer = MinutesTimer(started, evaluates, first, self.ranks, self.step_log, self.validation.costs)

        def read(step: int) -> Batch:
            return batches.batch_at(step, self.engine.samples_of(batches.sizes.size_at(step)))

        self.is_running = True
        try:
            for step, batch in prefetch(read, range(self.start.step, self.run_length.steps)):
                if step == self.run_length.steps or self.validation.stops_early:
                    break
                self.ranks.report_progress(f"step {step + 1}")
                faults.break_process(step)
                current = TrainingStep(self.engine, batch, step + 1, self.run_length.lr_at(step))
                self.done = step + 1
                yield current
                result = current.finish()
                self.has_own_loss = self.has_own_loss or current.has_own_loss
                self._after_step(step + 1, result)
            self.saver.wait()
            if self.first:
                self.trackers.note(describe_best(self.folder))
        finally:
            self.is_running = False
            self.saver.join()
            self.trackers.close()

    def _after_step(self, done: int, result: Step) -> None:
        """Log, check, evaluate, save and stop, as far as due after `done` steps."""
        log = self.step_log
        train = self.config.train
        run_length = self.run_length
        log.flush()
        self.skipped_updates.add(done, result)
        run_length = self.timer.after_step(run_length, done, result)
        is_new_length = run_length is not self.run_length
        self.trackers.advance(done)
        if result.note:
            self.trackers.note(f"step {done}: {result.note}")
        if done == 1 or run_length.is_due(train.log_every, done):
            log.add(done, result)
        if done == 1 or is_new_length:
            log.flush()
        if is_new_length:
            self.run_length = run_length
            self.trackers.set_steps(run_length.steps)
            if self.timer.is_news(run_length):
                self.trackers.note(f"train: {run_length.describe()}")
                self._note_mixture(run_length)
        metrics: dict[str, float] = {}
        if self.validation.is_due(run_length, done):
            with log.paused(result):
                metrics = self.validation.measure(run_length, done, self.trackers, self.batches.batch_at)
        stop_signal = agree_to_stop(self.ranks, self.signals, self.saver, self.token_check)
        if stop_signal or self.validation.stops_early or run_length.is_due(train.save_every, done):
            with log.paused(result):
                saved = self._save(done, result, metrics)
        if stop_signal and done < run_length.steps:
            self.saver.wait()
            raise stop_error(stop_signal, self.folder, done, self.first, saved)

    def _log(self, done: int, result: Step, tokens_per_second: float) -> None:
        values = {"loss": result.loss, **result.terms, **self.run_length.metrics_of(done), "grad_norm": result.norm}
        values |= {} if self.has_own_loss else self.validation.train_metrics(result.loss)
        values["tokens_per_second"] = tokens_per_second
        if result.scale is not None:
            values["loss_scale"] = result.scale
        values |= self.slowest_rank
        self.slowest_rank = {}
        self.trackers.log(done, values)
        self.skipped_updates.check(done, result, self.trackers)

    def _save(self, done: int, result: Step, metrics: dict[str, float]) -> bool:
        """Save, unless the loss is not finite; the last save waits until the token files are checked."""
        last = done == self.run_length.steps or self.validation.stops_early
        if self.skipped_updates.refuses_save(done, result.loss, metrics, last=last, trackers=self.trackers):
            return False
        self.slowest_rank = compare_ranks(self.engine, done, self.trackers)
        if last:
            run_on_all(self.ranks, lambda: self.token_check.wait(self.ranks, self.signals))
        state = RunState(done, self.start, self.run_length, result.loss, metrics, self.validation.best)
        folder = self.saver.save(take_snapshot(self.engine, state, self.files))
        self.trackers.note(f"step {done}: saving {format_path(folder)}")
        if self.config.train.sample_prompts:
            self.saver.wait()
            if self.first:
                self._write_samples(folder, done)
        return True

    def _write_samples(self, folder: Path, step: int) -> None:
        """Append the continuations to samples.jsonl and note them; an error does not stop training."""
        config = self.config
        with closing(JsonLines(self.folder / SAMPLES_FILE)) as lines:
            try:
                prompts = config.train.sample_prompts
                for line in sample_prompts(open_checkpoint(folder), prompts, config.sample, config.engine):
                    lines.log(step, line)
                    self.trackers.note(f"step {step}: {line['prompt']}|{line['text'][:200]!r}")
            except Exception as error:
                self.trackers.note(f"step {step}: train.sample_prompts: {error}")


@contextmanager
def capture_outputs(net: Any, name: str) -> Iterator[list[Any]]:
    """The outputs of a module of a net, from the passes inside the `with` block."""
    modules = dict(net.named_modules())
    if name not in modules:
        near = difflib.get_close_matches(name, modules, n=3)
        raise TextmillError(f"capture: no module '{name}'; choose one such as {', '.join(near or [*modules][1:4])}")
    outputs: list[Any] = []
    hook = modules[name].register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()


class TrainingStep:
    """One step of a run, to be computed by the caller: `run`, or for each of its micro-batches `backward`.

    The losses of all micro-batches and processes are added up. So a loss is a sum over tokens, each with its weight in
    `batch.weights`; these are 1 in total.
    """

    def __init__(self, engine: Engine, batch: Batch, number: int, learning_rate: float) -> None:
        self.engine = engine
        self.samples = batch
        """This process's part of the batch, in numpy."""
        self.number = number
        """Counted from 1."""
        self.learning_rate = learning_rate
        self._passes: Any = None
        self._current: MicroBatch | None = None
        self._needs_loss = False
        self.has_own_loss = False
        """Whether a loss was not that of `loss`."""
        self._result: Step | None = None
        self._micro_batches: Iterator[MicroBatch] | None = None

    def run(self) -> None:
        """The passes and the update that the settings describe."""
        self._result = self.engine.train_step(self.samples, self.number - 1, self.learning_rate)

    def __iter__(self) -> Iterator[MicroBatch]:
        """The micro-batches on the device, of this process: a loss of each must go to `backward`."""
        engine: Any = self.engine
        if not hasattr(engine, "open_step"):
            raise TextmillError("an own loss in a loop needs engine.kind=torch; other engines have step.run() only")
        axis = "tensor" if engine.parallel.tensor else "pipeline"
        if engine.scaler or engine.parallel.mesh.ranks_per_sample > 1:
            wrong = "engine.precision=fp16" if engine.scaler else f"engine.mesh.{axis}"
            raise TextmillError(f"an own loss in a loop does not work with {wrong}; remove it")
        with engine.open_step(self.samples, self.number - 1, self.learning_rate) as self._passes:
            for micro_batch in self._passes:
                self._current = micro_batch
                self._needs_loss = True
                yield micro_batch
                if self._needs_loss:
                    raise TextmillError(f"step {self.number}: a micro-batch without a loss; call step.backward(loss)")
        self._result = self._passes.result

    @property
    def batch(self) -> MicroBatch:
        """The micro-batch of a step that has only one."""
        if self._micro_batches is None:
            self._micro_batches = iter(self)
            next(self._micro_batches)
        assert self._current is not None
        return self._current

    @property
    def net(self) -> BaseNet:
        """The net, a torch module: `net(ids)` are hidden states, `net.logits(hidden)` their logits."""
        engine: Any = self.engine
        engine.graphs = None  # the caller may change it
        return engine.net  # type: ignore[no-any-return]

    def logits(self, batch: MicroBatch) -> Tensor:
        """The logits [N, T, vocabulary] of a micro-batch, in fp32: they take much more memory than `loss`."""
        return self._passes.logits(batch)  # type: ignore[no-any-return]

    def loss(self, batch: MicroBatch) -> Tensor:
        """The loss that the settings describe."""
        return self._passes.loss(batch)  # type: ignore[no-any-return]

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradients of a micro-batch's loss."""
        self.has_own_loss = self.has_own_loss or loss is not self._passes.loss_of_settings
        self._passes.backward(loss)
        self._needs_loss = False

    def finish(self) -> Step:
        """The result, once all micro-batches had their backward pass."""
        if self._micro_batches is not None and next(self._micro_batches, None) is not None:
            raise TextmillError(
                f"step {self.number}: has several micro-batches; write: for batch in step, or set engine.micro_batch="
                f"{len(self.samples.inputs)}"
            )
        if self._result is None:
            raise TextmillError(f"step {self.number}: was not computed; call step.run(), or iterate over the step")
        return self._result


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


class TokenCheck:
    """Compares the token files with their checksums, in a daemon thread.

    `files` are paths with their manifest entries, which may name the command that writes them; none on ranks other than
    the first."""

    def __init__(self, run: Path, files: dict[Path, dict[str, Any]]) -> None:
        self.run = run
        self.files = files
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._check, name="check tokens", daemon=True)
        self._thread.start()

    def _check(self) -> None:
        try:
            checked = self._read_checked()
            for path, entry in self.files.items():
                state = [entry["sha256"], (before := path.stat()).st_size, before.st_mtime_ns]
                if checked.get(str(path)) == state:
                    continue
                if damage := find_damage(path.parent, {path.name: entry}):
                    raise TextmillError(
                        f"{path.parent}: {damage[0]}, so the training data is wrong; no further checkpoint is saved; "
                        f"put the file back, or make it again with: textmill {entry.get('command', 'tokenize')} WHERE "
                        "--force"
                    )
                checked[str(path)] = state
                write_json(self.run / CHECKED_FILE, checked)
        except BaseException as error:
            self._error = error

    def _read_checked(self) -> dict[str, Any]:
        """What earlier processes of this run found intact; a damaged list counts as empty."""
        try:
            found = read_json(self.run / CHECKED_FILE)
            return found if isinstance(found, dict) else {}
        except TextmillError:
            return {}

    @property
    def failed(self) -> bool:
        """Whether a file is damaged and `wait` will raise the error; does not wait."""
        return self._error is not None

    def wait(self, ranks: Ranks, signals: StopSignals) -> None:
        """Wait for the check, unless a stop signal arrives; raise the error that it found."""
        while self._thread.is_alive() and signals.received is None:
            ranks.report_progress()
            self._thread.join(POLL_SECONDS)
        self.raise_error()

    def raise_error(self) -> None:
        """Raise the error that the check found so far, if there is one."""
        if self._error is not None:
            raise self._error


def describe_best(run: Path) -> str:
    """Describe the best checkpoint of a run; also report a better step that was not saved, and overfitting."""
    rule, values = read_best_values(run)
    best = rule.best_of(values)
    if best is None:
        return f"train: no checkpoint has a {rule.name}, so there is no best one"
    measured = values | _read_logged(run, rule.metric)
    best_measured = rule.best_of(measured)
    assert best_measured is not None
    folder = run / BEST_LINK if (run / BEST_LINK).exists() else list_checkpoints(run)[best]
    text = f"train: the best checkpoint is step {best:,}, {rule.describe(values[best])}: {format_path(folder)}"
    if rule.is_better(measured[best_measured], values[best]):
        interval = "train.evaluate_every" if rule.metric == VALID_LOSS else "the interval at which it is measured"
        text += f"; step {best_measured:,} had {measured[best_measured]:.4f} but was not saved: "
        text += f"set train.save_every to a divisor of {interval}"
    return text + _describe_overfitting(run)


def _describe_overfitting(run: Path) -> str:
    losses = read_metric(list_checkpoints(run), VALID_LOSS) | _read_logged(run, VALID_LOSS)
    lowest = BestRule().best_of(losses)
    if lowest is None or (last := losses[max(losses)]) <= OVERFITTING_RATIO * losses[lowest]:
        return ""
    return (
        f"; overfitting: valid loss rose from {losses[lowest]:.4f} to {last:.4f} since step {lowest:,}; "
        "use more text, fewer steps or a higher train.weight_decay"
    )


def _read_logged(run: Path, metric: str) -> dict[int, float]:
    """The finite values of a metric in metrics.jsonl, by step."""
    path = run / METRICS_FILE
    values = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        entry = json.loads(line)
        if entry.get(metric) is not None and math.isfinite(entry[metric]):
            values[entry["step"]] = entry[metric]
    return values
