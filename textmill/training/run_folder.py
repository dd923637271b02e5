"""The content of a run folder: what is removed when a run starts or resumes, what each checkpoint contains, and the
thread that writes it.

`open_run_folder` is called once, before the first step; `take_snapshot` for every checkpoint, which `Saver` writes
while training continues, one at a time, on all ranks together.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from textmill import __version__
from textmill.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_MODEL, MERGED_CONFIG, PREFIX
from textmill.checkpoints.best import VALID_LOSS, BestStep
from textmill.checkpoints.folders import find_checkpoint_damage, link_best, list_checkpoints
from textmill.checkpoints.writing import FilePlan, Snapshot, prune, remove_leftovers, write_checkpoint
from textmill.config import LoraConfig, RunConfig, TrainConfig
from textmill.config.own_files import OwnFile
from textmill.engines.distillation import teacher_flops
from textmill.errors import AlreadyReported, Interrupted, TextmillError, warn
from textmill.models import hf_config_of, tokenizer_files
from textmill.models.lora import peft_config_of, weights_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.processes.ranks import SINGLE_PROCESS, Ranks
from textmill.processes.signals import STOPPED_FILE
from textmill.storage.files import remove_folder, write_bytes, write_text
from textmill.storage.stages import RUN_YAML, add_yaml_checksum
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.track import Trackers, open_trackers
from textmill.track.console import Throughput
from textmill.track.jsonl import METRICS_FILE, environment, truncate_after
from textmill.training.changing import describe_changes
from textmill.training.run_length import RunLength
from textmill.training.start import Start

SAMPLES_FILE = "samples.jsonl"
SUMMARY_FILE = "summary.json"
"""Results and texts of the finished model, which `textmill run` writes."""
REPLACED_METRICS = "metrics.replaced.jsonl"
"""The metrics of a run before it went back to an earlier step, until it has saved again."""
INDEX_FOLDER = "index"
"""The folder of large data indexes, which all ranks of a run share."""


def open_run_folder(config: RunConfig, run_length: RunLength, start: Start, description: dict[str, Any]) -> Trackers:
    """Clean the run folder, write run.yaml and open all trackers; their first lines describe engine and run length."""
    run = config.folder_of("train")
    clean_run_folder(run, start.step)
    write_text(run / RUN_YAML, add_yaml_checksum(config.to_yaml()))
    rules = rules_of(start.shape, config.train, config.model.lora)
    trained = [weight for weight in weights_with_adapters(start.shape, config.model.lora) if rules[weight.name].trained]
    flops_per_token = start.shape.flops_per_token(run_length.sample_length, trained)
    flops_per_token += teacher_flops(config.train.distil, run_length.sample_length)
    steps = run_length.steps if run_length.known else None
    throughput = Throughput(steps, start.step, run_length.tokens_after, flops_per_token, description["peak_flops"])
    settings = {"environment": environment(), "fingerprints": _fingerprints(start)}
    trackers = open_trackers(config.track, run, throughput, config.model_dump(mode="json") | settings)
    for line in start.new_changes:
        warn(f"changed since step {start.step}: {line}")
    if start.changed_now:
        trackers.mark(start.step, "; ".join(describe_changes(start.ranges)[start.step]))
    action = f"resumes from step {start.step:,}" if start.step else "starts"
    trackers.note(f"train: {describe_engine(description)}; {action}")
    trackers.note(f"train: {run_length.describe()}")
    return trackers


def clean_run_folder(run: Path, step: int) -> None:
    """Remove stopped.json and, for a new run (step 0), everything of the run before.

    When a run goes back to an earlier step, its later checkpoints and their metrics stay until it has saved again.
    """
    remove_leftovers(run)
    (run / STOPPED_FILE).unlink(missing_ok=True)
    metrics = run / METRICS_FILE
    replaced = run / REPLACED_METRICS
    if replaced.is_file():  # the run went back to an earlier step before, but did not save after that
        os.replace(replaced, metrics)
    later_steps = [saved for saved in list_checkpoints(run) if saved > step]
    if later_steps:
        when = "when this run saves its first checkpoint" if step else "now"
        steps = f"{'step' if len(later_steps) == 1 else 'steps'} {', '.join(map(str, later_steps))}"
        print(f"train: starts again from step {step}; the checkpoints of {steps} are removed {when}", flush=True)
    if later_steps and step and metrics.is_file():
        write_bytes(replaced, [metrics.read_bytes()])
    if later_steps and not step:
        remove_replaced(run, step=0, saved=0)
    link_best(run)
    truncate_after(run / SAMPLES_FILE, step)
    if not step:
        remove_folder(run / "evaluation")
        (run / SUMMARY_FILE).unlink(missing_ok=True)


def remove_replaced(run: Path, step: int, saved: int) -> None:
    """Remove the checkpoints after `step`, except the one just saved, and their metrics."""
    (run / REPLACED_METRICS).unlink(missing_ok=True)
    for later, folder in list_checkpoints(run).items():
        if later > step and later != saved:
            remove_folder(folder)


def describe_engine(description: dict[str, Any]) -> str:
    """Parameters, device, precision and micro-batch in one line; with LoRA or frozen weights, how many are trained."""
    parameters = description["parameters"]
    trained = description["trained"]
    trained_part = "" if trained == parameters else f", {trained:,} of them trained ({trained / parameters:.2%}),"
    processes = f"{description['processes']} processes on " if description.get("processes", 1) > 1 else ""
    compiling = f", {description['compiling']}" if description.get("compiling") else ""
    device = f"{processes}{description['device']} in {description['precision']}"
    local_sgd = f"; {description['local_sgd']}" if description.get("local_sgd") else ""
    batch = f"micro-batch {description['micro_batch']}{compiling}{local_sgd}"
    return f"{parameters:,} parameters{trained_part} on {device}, {batch}"


def _fingerprints(start: Start) -> dict[str, Any]:
    """What identifies the inputs of a run: its tokens, tokenizer and first weights."""
    return {key: start.made_from.get(key) for key in ("tokens", "tokenizer", "model.init_from")}


def checkpoint_files(
    start: Start, lora: LoraConfig | None, tokenizer: TextTokenizer, run_yaml: str, own_files: Mapping[str, OwnFile]
) -> dict[str, bytes]:
    """The files of every checkpoint besides tensors: configs of transformers and PEFT, run.yaml, the tokenizer, and the
    user's own files as text, by the settings that name them: to be read, since nothing executes them."""
    shape = start.shape
    hf_config = hf_config_of(shape, tokenizer)
    if lora and start.base:
        configs = {MERGED_CONFIG: hf_config, ADAPTER_CONFIG: peft_config_of(shape, lora, start.base)}
    else:
        configs = {"config.json": hf_config}
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in configs.items()}
    texts["run.yaml"] = run_yaml
    texts.update(tokenizer_files(shape, tokenizer))
    sources = {f"{key}.py.txt": file.source for key, file in own_files.items()}
    return {**{name: text.encode() for name, text in texts.items()}, **sources}


@dataclass(frozen=True)
class RunState:
    """What a run knows after a step, besides what its engine holds."""

    step: int
    start: Start
    run_length: RunLength
    loss: float
    metrics: dict[str, float]
    """What was measured after this step."""
    best: BestStep

    def progress(self, engine: Any) -> dict[str, Any]:
        """The content of progress.json. Losses and metrics are saved as hex, so that they are exact."""
        start = self.start
        run_length = self.run_length
        exact_metrics = {name: value.hex() for name, value in self.metrics.items()}
        return {
            "step": self.step,
            "updates": engine.updates(),
            "samples": run_length.samples_after(self.step),
            "tokens": run_length.tokens_after(self.step),
            "loss": self.loss.hex(),
            "valid_loss": exact_metrics.get(VALID_LOSS),
            "metrics": exact_metrics,
            "best": self.best.save_state(),
            "made_from": start.made_from,
            "changes": start.changes,
            "ranges": start.ranges,
            "sources": start.sources,
            "textmill": __version__,
            "scaling": engine.scaling(),
            "run_length": run_length.save_state(),
        }


def take_snapshot(engine: Any, state: RunState, files: dict[str, bytes]) -> Snapshot:
    """Copy to host memory what this rank writes of a checkpoint.

    All ranks go through the names of all tensors in the same order. A `FilePlan` puts each tensor into a file and
    knows which rank writes that file; the engine copies a tensor only on that rank.
    """
    start = state.start
    tensor_bytes = {weight.name: 4 * math.prod(weight.shape) for weight in start.shape.weights()}
    new_plan = partial(
        FilePlan,
        size_of=lambda name: tensor_bytes.get(name.rpartition("/")[2], 0),  # moments are named KIND/WEIGHT
        rank=engine.ranks.rank,
        world=engine.ranks.world,
    )
    is_lora = start.base is not None
    prefix = PREFIX if is_lora else ""
    weight_plan = new_plan(ADAPTER_MODEL.removesuffix(".safetensors") if is_lora else "model")

    def add_weight(name: str) -> bool:
        """Put a weight into a file; True if this rank writes it."""
        return weight_plan.add(prefix + name)

    weights = list(engine.weights(add_weight))
    weights += [(name, values) for name, values in start.changed_weights if add_weight(name)]
    moment_plan = new_plan("optimizer", first_writer=len(weight_plan.files))
    return Snapshot(
        step=state.step,
        weights=[(prefix + name, values) for name, values in weights],
        optimizer_state=list(engine.optimizer_state(moment_plan.add)),
        progress=state.progress(engine),
        files=files,
        file_plans=(weight_plan, moment_plan),
    )


def open_saver(run: Path, train: TrainConfig, start: int, ranks: Ranks) -> Saver:
    """The saver of a run that starts or resumes at step `start`, over a process group of its own."""
    rule = train.checkpoints
    return Saver(run, keep=rule.keep, keep_every=rule.keep_every, ranks=ranks.new_group(), start=start)


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
