"""The content of a run folder: what each checkpoint contains, and what is removed when a run starts or resumes.

`open_run_folder` is called once, before the first step; `take_snapshot` for every checkpoint, which training/saving.py
then writes in a thread.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from textmill import __version__
from textmill.checkpoints.adapters import ADAPTER_CONFIG, ADAPTER_MODEL, MERGED_CONFIG, PREFIX
from textmill.checkpoints.best import VALID_LOSS
from textmill.checkpoints.file_plan import FilePlan
from textmill.checkpoints.folders import link_best, list_checkpoints
from textmill.checkpoints.pruning import remove_leftovers
from textmill.checkpoints.writing import Snapshot
from textmill.config import RunConfig
from textmill.engines.distillation.teachers import teacher_flops
from textmill.errors import warn
from textmill.models import open_family
from textmill.models.lora import peft_config_of, weights_with_adapters
from textmill.models.parameter_groups import rules_of
from textmill.processes.signals import STOPPED_FILE
from textmill.storage.files import remove_folder, write_bytes, write_text
from textmill.storage.stages import RUN_YAML, add_yaml_checksum
from textmill.tokens.splits import Splits
from textmill.track import Trackers, open_trackers
from textmill.track.jsonl import METRICS_FILE, truncate_after
from textmill.track.notes import environment
from textmill.training.best_step import BestStep
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


def checkpoint_files(config: RunConfig, data: Splits, start: Start) -> dict[str, bytes]:
    """The files of every checkpoint besides tensors: configs of transformers and PEFT, run.yaml and the tokenizer."""
    shape = start.shape
    lora = config.model.lora
    hf_config = open_family(shape.family).hf_config_of(shape)
    if lora and start.base:
        configs = {MERGED_CONFIG: hf_config, ADAPTER_CONFIG: peft_config_of(shape, lora, start.base)}
    else:
        configs = {"config.json": hf_config}
    texts = {name: json.dumps(value, indent=2) + "\n" for name, value in configs.items()}
    texts["run.yaml"] = config.to_yaml()
    texts.update(data.tokenizer.files(shape.positions))
    return {name: text.encode() for name, text in texts.items()}


def open_run_folder(config: RunConfig, run_length: RunLength, start: Start, facts: dict[str, Any]) -> Trackers:
    """Clean the run folder, write run.yaml and open all trackers; their first lines describe engine and run length."""
    run = config.folder_of("train")
    clean_run_folder(run, start.step)
    write_text(run / RUN_YAML, add_yaml_checksum(config.to_yaml()))
    rules = rules_of(start.shape, config.train, config.model.lora)
    trained = [weight for weight in weights_with_adapters(start.shape, config.model.lora) if rules[weight.name].trained]
    flops_per_token = start.shape.flops_per_token(run_length.sample_length, trained)
    flops_per_token += teacher_flops(config, run_length.sample_length)
    trackers = open_trackers(
        config.track,
        run,
        steps=run_length.steps if run_length.known else None,
        start=start.step,
        tokens=run_length.tokens_after,
        flops_per_token=flops_per_token,
        peak_flops=facts["peak_flops"],
        settings=config.model_dump(mode="json") | {"environment": environment(), "fingerprints": _fingerprints(start)},
    )
    for line in start.new_changes:
        warn(f"changed since step {start.step}: {line}")
    if start.changed_now:
        trackers.mark(start.step, "; ".join(describe_changes(start.ranges)[start.step]))
    action = f"resumes from step {start.step:,}" if start.step else "starts"
    trackers.note(f"train: {describe_engine(facts)}; {action}")
    trackers.note(f"train: {run_length.describe()}")
    return trackers


def _fingerprints(start: Start) -> dict[str, Any]:
    """What identifies the inputs of a run: its tokens, tokenizer and first weights."""
    return {key: start.made_from.get(key) for key in ("tokens", "tokenizer", "model.init_from")}


def describe_engine(facts: dict[str, Any]) -> str:
    """Parameters, device, precision and micro-batch in one line; with LoRA or frozen weights, how many are trained."""
    parameters = facts["parameters"]
    trained = facts["trained"]
    trained_part = "" if trained == parameters else f", {trained:,} of them trained ({trained / parameters:.2%}),"
    processes = f"{facts['processes']} processes on " if facts.get("processes", 1) > 1 else ""
    compiling = f", {facts['compiling']}" if facts.get("compiling") else ""
    device = f"{processes}{facts['device']} in {facts['precision']}"
    return f"{parameters:,} parameters{trained_part} on {device}, micro-batch {facts['micro_batch']}{compiling}"


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
            "spikes": engine.guard.save_state() if engine.guard else {},
            "run_length": run_length.save_state(),
        }


def take_snapshot(engine: Any, state: RunState, files: dict[str, bytes]) -> Snapshot:
    """Copy to host memory what this rank writes of a checkpoint.

    All ranks go through the names of all tensors in the same order. A `FilePlan` puts each tensor into a file and
    knows which rank writes that file; the engine copies a tensor only on that rank.
    """
    start = state.start
    max_bytes = int(state.run_length.train.checkpoints.max_file_gb * 1e9)
    family = open_family(start.shape.family)
    tensor_bytes = {weight.name: 4 * math.prod(weight.shape) for weight in family.weights_of(start.shape)}
    new_plan = partial(
        FilePlan,
        size_of=lambda name: tensor_bytes.get(name.rpartition("/")[2], 0),  # moments are named KIND/WEIGHT
        max_bytes=max_bytes,
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
        moments=list(engine.moments(moment_plan.add)),
        progress=state.progress(engine),
        files=files,
        file_plans=(weight_plan, moment_plan),
    )
