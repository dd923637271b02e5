"""`train.preset=auto`: learning rates, batch, weight decay and warm-up by formula, for any size.

`fill_auto_preset` finds out what the formulas need, once net, tokens and length of the run are known: the number of
parameters, the unique tokens of the text, and how many tokens the run will see. `auto_settings` and what follows are
pure arithmetic, which the planner of `textmill new` uses too. docs/autopilot.md has the source of every constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import list_checkpoints
from textmill.config import ModelConfig, RunConfig, TrainConfig
from textmill.config.training import AUTO_SETTINGS
from textmill.errors import TextmillError
from textmill.models import Shape, count_blocks_and_head
from textmill.storage.files import read_json
from textmill.storage.stages import Force
from textmill.tokens.splits import Splits, open_splits
from textmill.training.start import batch_multiple, choose_shape

MUON_RATE = 0.125
"""Muon's learning rate is this divided by the square root of the width."""
MUON_ADAMW_RATE = 0.01
"""With Muon: AdamW's learning rate of embeddings, biases and LayerNorms."""
ADAMW_RATE = 0.46
ADAMW_MAX_RATE = 3e-3
"""AdamW's learning rate is the first divided by the width, at most the second."""
BATCH_TOKENS = 16_000
BATCH_AT = 30e6
BATCH_POWER = 0.3
"""Tokens of a step where the run has BATCH_AT tokens; the batch grows by this power of the run's tokens."""
MIN_STEPS = 2000
"""The batch is small enough for this many steps."""
ADAMW_BATCH = 2
"""AdamW's batch is this many times Muon's."""
MAX_WEIGHT_DECAY = 4.0
"""The highest weight decay that was the best in a measurement."""
DECAY_EPOCHS = 0.4
DECAY_EPOCHS_OF_FEW = 2.6
DECAY_RATIO = 2.4
"""The timescale of weight decay in epochs where text is repeated much: the first, in few epochs the second divided by
their number, and longer for nets with fewer parameters per token than the third."""
WARMUP = 0.05
MAX_WARMUP_STEPS = 2000
"""Warm-up: a fraction of the run, but not more than so many steps."""
TARGET_EPOCHS = 2.6
TARGET_POWER = 0.58
"""Epochs of a net that has as many parameters as the text has tokens; a net with more parameters needs more, by this
power of its parameters per token."""
MAX_EPOCHS = 10
"""More epochs than this do not help a net of any size: on text that it has not seen it only becomes worse."""
TOKENS_PER_PARAMETER = 11
"""Tokens to train on for each parameter of a net that is so small for its text that these take less."""
SMALL_NET = 1e7
SMALL_NET_POWER = 0.4
"""Nets below this many parameters are best with fewer tokens for each, by this power of their size."""


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
        multiple = batch_multiple(config.engine, processes)
        values = _compute_settings(config.model, config.train, open_splits(config), multiple)
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


def _compute_settings(model: ModelConfig, train: TrainConfig, data: Splits, multiple: int) -> dict[str, Any]:
    """All settings of AUTO_SETTINGS by formula; the batch is a multiple of `multiple`."""
    shape = choose_shape(model, train.length, data, None)
    unique_tokens = max(1, sum(store.tokens for store in data.stores("train")))
    length = train.length or shape.positions
    fixed_batch_tokens = None if "batch" in train.open_settings else train.batch * length
    run_tokens = _count_run_tokens(train, shape, unique_tokens, length, fixed_batch_tokens)
    if fixed_batch_tokens:
        batch = train.batch
    else:
        by_steps = train.unit == "steps"
        batch_tokens = run_tokens / train.steps if by_steps else best_batch_tokens(train.optimizer, run_tokens)
        batch = _round_batch(batch_tokens / length, multiple)
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


@dataclass(frozen=True)
class Settings:
    """The settings that the formulas compute."""

    learning_rate: float
    weight_decay: float
    batch_tokens: float
    warmup: float
    adamw_rate_factor: float = 1.0
    """With Muon."""


def auto_settings(
    optimizer: str,
    width: int,
    parameters: float,
    unique_tokens: float,
    run_tokens: float,
    batch_tokens: float | None = None,
) -> Settings:
    """The settings for a net of so many parameters, a text of `unique_tokens` and a run that sees `run_tokens`.

    `batch_tokens` overrides the formula of the batch; the weight decay fits it.
    """
    rate = learning_rate(optimizer, width)
    batch = batch_tokens or best_batch_tokens(optimizer, run_tokens)
    steps = run_tokens / batch
    epochs = run_tokens / unique_tokens
    return Settings(
        learning_rate=round_setting(rate),
        weight_decay=round_setting(best_weight_decay(rate, batch, epochs, parameters, unique_tokens)),
        batch_tokens=batch,
        warmup=WARMUP if WARMUP * steps <= MAX_WARMUP_STEPS else MAX_WARMUP_STEPS,
        adamw_rate_factor=round_setting(MUON_ADAMW_RATE / rate),
    )


def learning_rate(optimizer: str, width: int) -> float:
    """The highest learning rate of the schedule."""
    return MUON_RATE / math.sqrt(width) if optimizer == "muon" else min(ADAMW_MAX_RATE, ADAMW_RATE / width)


def best_batch_tokens(optimizer: str, run_tokens: float) -> float:
    """Tokens of a step in a run that sees so many tokens."""
    factor = 1 if optimizer == "muon" else ADAMW_BATCH
    return min(run_tokens / MIN_STEPS, factor * BATCH_TOKENS * math.pow(run_tokens / BATCH_AT, BATCH_POWER))


def best_weight_decay(
    rate: float, batch_tokens: float, epochs: float, parameters: float, unique_tokens: float
) -> float:
    """From the timescale of weight decay in epochs, batch / (rate x decay x unique tokens): how long a weight keeps
    what it learnt. The best timescale is known for text that is repeated little and for text that is repeated much."""
    ratio = parameters / unique_tokens
    little_repeated = 1.08 * epochs * math.pow(epochs / ratio, -0.53)
    much_repeated = max(DECAY_EPOCHS, DECAY_EPOCHS_OF_FEW / epochs) * max(1.0, DECAY_RATIO / ratio)
    timescale = min(little_repeated, much_repeated)
    return min(MAX_WEIGHT_DECAY, batch_tokens / (rate * unique_tokens * timescale))


def target_epochs(parameters: float, unique_tokens: float) -> float:
    """How often a net of this size should see a text of so many unique tokens; fewer leave it undertrained."""
    ratio = parameters / unique_tokens
    tokens_per_parameter = TOKENS_PER_PARAMETER * math.pow(min(1.0, parameters / SMALL_NET), SMALL_NET_POWER)
    return min(tokens_per_parameter * ratio, TARGET_EPOCHS * math.pow(ratio, TARGET_POWER), MAX_EPOCHS)


def round_setting(value: float) -> float:
    """Two significant digits."""
    return float(f"{value:.2g}")
