"""`train.preset=auto`: learning rates, batch, weight decay and warm-up by formula, for any size. Pure arithmetic.

The planner of `textmill new` uses the same functions. docs/autopilot.md has the source of every constant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
MAX_WEIGHT_DECAY = 3.2
"""The highest weight decay that was the best in a measurement."""
WARMUP = 0.05
MAX_WARMUP_STEPS = 2000
"""Warm-up: a fraction of the run, but not more than so many steps."""
TARGET_EPOCHS = 2.6
TARGET_POWER = 0.45
"""Epochs of a net that has as many parameters as the text has tokens; a net with more parameters needs more, by this
power of its parameters per token."""
MAX_EPOCHS = 25
"""More epochs than this do not help a net of any size."""
TOKENS_PER_PARAMETER = 11
"""Tokens to train on for each parameter of a net that is so small for its text that these take less."""
SMALL_NET = 1e7
SMALL_NET_POWER = 0.4
"""Nets below this many parameters are best with fewer tokens for each, by this power of their size."""


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
    much_repeated = max(0.3, 2.0 * math.pow(ratio, -0.5) * math.pow(max(unique_tokens, 2e6) / 2e6, -0.3))
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
