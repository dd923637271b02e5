"""Open everything a run needs before its first step: data, start, batches, run length and engine."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig, TrainConfig
from textmill.engines import Engine, open_engine
from textmill.engines.distillation.teachers import check_teachers, resolve_teachers
from textmill.errors import TextmillError
from textmill.processes.ranks import Ranks, report_each
from textmill.storage import faults
from textmill.storage.stages import Force
from textmill.tokens.batches.loader import Batches, open_batches
from textmill.tokens.splits import Splits, open_splits
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.best_step import open_best_step
from textmill.training.changing import data_ranges
from textmill.training.imported_model import use_imported_model
from textmill.training.resuming import choose_start
from textmill.training.run_folder import INDEX_FOLDER
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.start import Start
from textmill.training.teacher_cache import open_teacher_cache

BYTES_PER_ID = 16
"""Inputs and labels of a batch, in 8 bytes each."""


def complete_config(config: RunConfig, force: Force, ranks: Ranks) -> RunConfig:
    """The config with folders in place of an imported model and of teachers, and with what `train.preset=auto` sets."""
    config = resolve_teachers(use_imported_model(config, write=ranks.first))
    return fill_auto_preset(config, force, ranks.world)


def prepare_run(
    config: RunConfig, force: Force, step: StepChoice, change: bool = False
) -> tuple[Splits, Start, Batches, RunLength]:
    """Open the data, choose what to start from, and compute the length of the run."""
    faults.break_process("start")
    data = open_splits(config)
    check_teachers(config, data.tokenizer)
    start = replace(choose_start(config, data, force, step, change), sources=data.sources)
    length = config.train.length or start.shape.positions
    _check_batch_memory(config.train, length)
    folder = config.folder_of("train") / INDEX_FOLDER
    history = data_ranges(start.ranges)
    batches = open_batches(config.train, data, length=length, folder=folder, history=history)
    run_length = plan_run_length(config.train, batches, length, start.run_length)
    if start.changed_now and start.step >= run_length.steps:
        limit = f"train.{config.train.unit}" + (" or train.max_epochs" if config.train.max_epochs else "")
        raise TextmillError(
            f"--change: {config.folder_of('train')} is at its last step, {start.step:,}; set a higher {limit} to "
            "train on with the new settings"
        )
    if config.train.distil.cache:
        batches.teacher, files = open_teacher_cache(config, data, run_length)
        data = replace(data, files=data.files | files)
    return data, start, batches, run_length


def describe_end(train: TrainConfig, start: Start, length: RunLength) -> str | None:
    """Why there is no step left to run: the checkpoint is at the last one, or the run ended early; None if there is."""
    if start.step >= length.steps:
        return f"step {start.step:,}"
    best = open_best_step(train.best, start.best)
    return f"step {start.step:,}: {best.describe()}" if best.is_over(train.best.patience) else None


def _check_batch_memory(train: TrainConfig, length: int) -> None:
    """Refuse a batch whose token ids alone do not fit into this machine's memory."""
    needed = max(train.sizes) * length * BYTES_PER_ID
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise TextmillError(
            f"train.batch: {max(train.sizes):,} samples of {length:,} tokens need {needed / 1e9:,.0f} GB, "
            f"this machine has {memory / 1e9:,.0f} GB; lower it"
        )


def build_engine(config: RunConfig, start: Start, ranks: Ranks, resources: ExitStack) -> Engine:
    """Open the engine and load the weights and optimizer state that the run starts from."""
    engine = open_engine(config, start.shape, ranks)
    resources.callback(engine.close)
    weights = report_each(ranks, start.weights)
    moments = report_each(ranks, start.moments)
    engine.load(weights, moments, start.updates, start.source, start.loss_scale)
    if engine.guard:
        engine.guard.load_state(start.spikes)
    return engine
