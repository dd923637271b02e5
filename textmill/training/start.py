"""What a run starts from: the model's shape, its weights, and the settings and inputs that decide the result.

A `Start` comes from new_run.py (step 0) or from resuming.py (a checkpoint of the run); setup.py loads it into the
engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig
from textmill.engines.distillation.teachers import fingerprint_teachers
from textmill.models import Shape, open_family, read_shape, recorded_numbers, with_label_head
from textmill.models.family_files import find_family_file
from textmill.models.lora import normalized_targets
from textmill.storage.files import hash_file
from textmill.storage.tensor_files import Named
from textmill.tokens.batches.blend import Source
from textmill.tokens.splits import Splits

FAMILY_SHA256 = "model.family_sha256"
"""The checksum of the user's own family file, among the inputs of a run."""


@dataclass(frozen=True)
class Start:
    """The state from which a run starts or resumes."""

    step: int
    shape: Shape
    weights: Iterable[Named]
    moments: Iterable[Named]
    """The optimizer state; empty for a new run."""
    updates: int
    """Optimizer updates done so far, without skipped ones."""
    source: str
    """Where the weights come from, for error messages."""
    made_from: dict[str, Any]
    """Settings and inputs that decide the result; a resumed run must have the same ones."""
    changes: list[dict[str, Any]] = field(default_factory=list)
    """Settings that were changed in mid-run, by step."""
    new_changes: list[str] = field(default_factory=list)
    """Those that were changed since the checkpoint, to be reported when the run resumes."""
    ranges: list[dict[str, Any]] = field(default_factory=list)
    """The settings of each step range, if some were changed with `--change`."""
    changed_now: bool = False
    """Whether the last of these ranges starts now."""
    sources: list[Source] = field(default_factory=list)
    """The token stores of the blend and their weights."""
    base: str | None = None
    """LoRA: the base model, by folder or hub name."""
    changed_weights: list[Named] = field(default_factory=list)
    """LoRA: full weights that differ from the base's, such as a resized embedding."""
    loss_scale: dict[str, float] = field(default_factory=dict)
    """fp16: the state of the loss scale."""
    spikes: dict[str, Any] = field(default_factory=dict)
    """`train.spikes.threshold`: the state of the spike guard."""
    best: dict[str, Any] = field(default_factory=dict)
    """`train.best`: the best value of the metric so far, and how often it was measured since."""
    run_length: dict[str, Any] = field(default_factory=dict)
    """`train.minutes`: the number of steps that was computed."""


def choose_shape(config: RunConfig, data: Splits, checkpoint: Checkpoint | None) -> Shape:
    """The shape of the model: that of a checkpoint, where dropout and positions may be overridden, or the config's."""
    if checkpoint is None:
        family = open_family(config.model.family)
        tokenizer = data.tokenizer
        shape = family.shape_of(config.model, vocab=tokenizer.vocab, end=tokenizer.end, length=config.train.length)
    else:
        shape = shape_of_checkpoint(config, checkpoint)
    labels = data.manifest.get("labels")
    return shape if labels is None else with_label_head(shape, labels["task"], labels["names"])


def shape_of_checkpoint(config: RunConfig, checkpoint: Checkpoint) -> Shape:
    """The shape of a checkpoint; `model.shape` may override dropout and positions."""
    shape = read_shape(checkpoint.folder)
    override = config.model.shape
    if isinstance(override, str):
        return shape
    if override.dropout is not None:
        shape = shape.with_dropout(override.dropout)
    return replace(shape, positions=override.positions or shape.positions)


def describe_inputs(config: RunConfig, data: Splits, shape: Shape, weights_fingerprint: str | None) -> dict[str, Any]:
    """All settings and inputs that decide the result; given files count by their content, not by their path."""
    settings = config.results("train")
    if config.train.masked.counts:
        settings["train.masked.counts"] = hash_file(Path(config.train.masked.counts))
    settings["train.length"] = config.train.length or shape.positions
    model = {f"model.{name}": value for name, value in recorded_numbers(shape).items()}
    lora = config.model.lora.model_dump() if config.model.lora else None
    if lora and config.model.lora:
        lora["targets"] = normalized_targets(shape, config.model.lora)
    if lora and not lora["dropout"]:
        del lora["dropout"]  # runs older than lora.dropout still resume
    inputs = {
        "model.init_from": weights_fingerprint,
        "model.init_layers": config.model.init_layers or None,
        "model.lora": lora,
        "tokens": data.fingerprint,
        "tokenizer": data.tokenizer.fingerprint,
    }
    if config.train.distil.teachers:
        settings["train.distil.teachers"] = fingerprint_teachers(config)
    if (file := find_family_file(shape.family)) is not None:
        inputs[FAMILY_SHA256] = file.sha256
    return {**settings, **model, **inputs}
