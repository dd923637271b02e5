"""Fill in the settings that `train.preset=auto` leaves open, once net, tokens and length of the run are known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import list_checkpoints
from textmill.config import RunConfig
from textmill.config.training import AUTO_SETTINGS
from textmill.errors import TextmillError
from textmill.storage.files import read_json
from textmill.storage.stages import Force
from textmill.tokens.splits import Splits, open_splits
from textmill.training.auto_settings import auto_settings, best_batch_tokens, wanted_epochs
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
        values = _compute(config, open_splits(config), processes)
    train, muon = config.train, config.train.muon
    changes: dict[str, Any] = {key: values[key] for key in open_settings if "." not in key}
    if "muon.adamw_rate_factor" in open_settings:
        changes["muon"] = muon.model_copy(update={"adamw_rate_factor": values["muon.adamw_rate_factor"]})
    return config.model_copy(update={"train": train.model_copy(update=changes)})


def _saved_settings(run: Path) -> dict[str, Any] | None:
    """The settings of the newest checkpoint; None if there is none. Whether it is intact is checked later."""
    for folder in reversed(list_checkpoints(run).values()):
        try:
            made_from = read_json(folder / "progress.json")["made_from"]
            return {key: made_from[f"train.{key}"] for key in AUTO_SETTINGS}
        except (TextmillError, KeyError, TypeError, OSError):
            continue
    return None


def _compute(config: RunConfig, data: Splits, processes: int) -> dict[str, Any]:
    """The settings by formula. Minutes are not known in tokens yet: the run is taken to have the epochs that its net
    wants."""
    train, shape = config.train, choose_shape(config, data, None)
    unique = max(1, sum(store.tokens for store in data.stores("train")))
    length = train.length or shape.positions
    wanted = wanted_epochs(shape.parameters, unique) * unique
    given = None if "batch" in train.open_settings else train.batch * length
    if train.unit == "steps":
        tokens = train.steps * (given or min(wanted / train.steps, best_batch_tokens(train.optimizer, wanted)))
    elif train.unit == "minutes":
        tokens = wanted
    else:
        tokens = {"epochs": (train.epochs or 0) * unique, "samples": (train.samples or 0) * length,
                  "tokens": train.tokens or 0}[train.unit]  # fmt: skip
    tokens = min(tokens, (train.max_epochs or math.inf) * unique)
    batch = given or (tokens / train.steps if train.unit == "steps" else best_batch_tokens(train.optimizer, tokens))
    micro = config.engine.micro_batch
    unit = processes * (micro if isinstance(micro, int) else 1)
    samples = max(1, round(batch / length / unit)) * unit
    samples = train.batch if given else _round_batch(samples, unit)
    found = auto_settings(train.optimizer, shape.width, shape.parameters, unique, tokens, samples * length)
    return {
        "learning_rate": found.learning_rate, "weight_decay": found.weight_decay, "batch": samples,
        "warmup": found.warmup, "muon.adamw_rate_factor": found.adamw_rate_factor,
    }  # fmt: skip


def _round_batch(samples: int, unit: int) -> int:
    """A batch with many divisors, so that micro-batches fit: a multiple of an eighth of its power of two."""
    step = max(unit, math.lcm(unit, 1 << max(0, samples.bit_length() - 4)))
    return max(step, round(samples / step) * step)
