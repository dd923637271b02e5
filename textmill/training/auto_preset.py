"""Fill in the settings that `train.preset=auto` leaves open, once net, tokens and length of the run are known.

The formulas are in auto_settings.py. This module finds out what they need: the number of parameters, the unique tokens
of the text, and how many tokens the run will see.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import list_checkpoints
from textmill.config import RunConfig, TrainConfig
from textmill.config.training import AUTO_SETTINGS
from textmill.errors import TextmillError
from textmill.models import Shape, count_blocks_and_head
from textmill.storage.files import read_json
from textmill.storage.stages import Force
from textmill.tokens.splits import Splits, open_splits
from textmill.training.auto_settings import auto_settings, best_batch_tokens, target_epochs
from textmill.training.start import choose_shape


def fill_auto_preset(config: RunConfig, force: Force = "no", processes: int = 1) -> RunConfig:
    """The config with every setting; unchanged unless `train.preset` is auto. A resumed run keeps its settings."""
    open_settings = config.train.open_settings
    if config.train.preset != "auto" or not open_settings:
        return config
    if config.model.init_from:
        raise TextmillError(
            f"train.preset: auto is for training from scratch, found model.init_from={config.model.init_from}; "
            "remove one of them"
        )
    values = _saved_settings(config.folder_of("train")) if force == "no" else None
    if values is None:
        values = _compute_settings(config, open_splits(config), processes)
    changes: dict[str, Any] = {key: values[key] for key in open_settings if "." not in key}
    if "muon.adamw_rate_factor" in open_settings:
        factor = values["muon.adamw_rate_factor"]
        changes["muon"] = config.train.muon.model_copy(update={"adamw_rate_factor": factor})
    return config.model_copy(update={"train": config.train.model_copy(update=changes)})


def _saved_settings(run: Path) -> dict[str, Any] | None:
    """The settings of the newest checkpoint; None if there is none. Whether it is intact is checked later."""
    for folder in reversed(list_checkpoints(run).values()):
        try:
            made_from = read_json(folder / "progress.json")["made_from"]
            return {key: made_from[f"train.{key}"] for key in AUTO_SETTINGS}
        except (TextmillError, KeyError, TypeError, OSError):
            continue
    return None


def _compute_settings(config: RunConfig, data: Splits, processes: int) -> dict[str, Any]:
    """All settings of AUTO_SETTINGS by formula."""
    train = config.train
    shape = choose_shape(config, data, None)
    unique_tokens = max(1, sum(store.tokens for store in data.stores("train")))
    length = train.length or shape.positions
    fixed_batch_tokens = None if "batch" in train.open_settings else train.batch * length
    run_tokens = _count_run_tokens(train, shape, unique_tokens, length, fixed_batch_tokens)
    if fixed_batch_tokens:
        batch = train.batch
    else:
        by_steps = train.unit == "steps"
        batch_tokens = run_tokens / train.steps if by_steps else best_batch_tokens(train.optimizer, run_tokens)
        micro_batch = config.engine.micro_batch
        batch = _round_batch(batch_tokens / length, processes * (micro_batch if isinstance(micro_batch, int) else 1))
    parameters = count_blocks_and_head(shape)
    settings = auto_settings(
        train.optimizer, shape.width, parameters, unique_tokens, run_tokens, batch_tokens=batch * length
    )
    return {
        "learning_rate": settings.learning_rate,
        "weight_decay": settings.weight_decay,
        "batch": batch,
        "warmup": settings.warmup,
        "muon.adamw_rate_factor": settings.adamw_rate_factor,
    }


def _count_run_tokens(
    train: TrainConfig, shape: Shape, unique_tokens: int, length: int, fixed_batch_tokens: int | None
) -> float:
    """Tokens that the run will see. How many minutes are is not known yet: then the run is taken to have as many
    epochs as its net should see."""
    target_tokens = target_epochs(count_blocks_and_head(shape), unique_tokens) * unique_tokens
    tokens: float
    if train.unit == "steps":
        best_tokens = min(target_tokens / train.steps, best_batch_tokens(train.optimizer, target_tokens))
        tokens = train.steps * (fixed_batch_tokens or best_tokens)
    elif train.unit == "epochs":
        tokens = (train.epochs or 0) * unique_tokens
    elif train.unit == "samples":
        tokens = (train.samples or 0) * length
    elif train.unit == "tokens":
        tokens = train.tokens or 0
    else:
        tokens = target_tokens
    return min(tokens, (train.max_epochs or math.inf) * unique_tokens)


def _round_batch(samples: float, multiple: int) -> int:
    """A multiple of `multiple` near `samples` that has many divisors, so that micro-batches fit: a multiple of an
    eighth of its power of two. 100 samples on one process -> 96 = 12 x 8."""
    batch = max(1, round(samples / multiple)) * multiple
    step = max(multiple, math.lcm(multiple, 1 << max(0, batch.bit_length() - 4)))
    return max(step, round(batch / step) * step)
