"""What other numbers of minutes would bring, by a published scaling law for repeated text. Pure arithmetic.

Muennighoff et al., "Scaling Data-Constrained Language Models": loss = E + A / N^a + B / D^a in nats per token, where
repeated tokens count for less. bench/LOG.md compares it with our own runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from textmill.planning.plan import MachineProfile, Plan, TextProfile, plan_for
from textmill.training.auto_preset import MAX_EPOCHS

IRREDUCIBLE = 1.87
"""E, in nats per token."""
OF_PARAMETERS = 521.0
OF_TOKENS = 1488.0
POWER = 0.353
"""A, B and a."""
REPEATS = 15.39
"""Epochs after which repeated tokens have lost most of their value."""
USUAL_SCALE = 0.45
"""How much of the law's reducible loss a text has: 0.27 for the Korean bills, 0.74 for mixed English."""
REFERENCE_VOCAB = 8192
"""Losses are per token of about this vocabulary, near that of the law."""
SHORTER_TOKENS = 0.2
"""The power of the vocabulary with which tokens become longer."""
LAW_PARAMETERS = 1_000_000
"""Below this the law expects too much of more time (bench/LOG.md), so `new` gives no forecast."""
FACTORS = (0.5, 4.0)
"""Times the minutes."""


@dataclass(frozen=True)
class Forecast:
    """The expected change of bits per byte with other minutes; negative: better."""

    minutes: float
    change: float


def reducible_loss(parameters: float, unique: float, epochs: float) -> float:
    """What the law adds to the irreducible loss, in nats per token of its own text."""
    repeated = max(0.0, epochs - 1)
    effective = unique * (min(1.0, epochs) + REPEATS * (1 - math.exp(-repeated / REPEATS)))
    return OF_PARAMETERS * math.pow(parameters, -POWER) + OF_TOKENS * math.pow(effective, -POWER)


def text_scale(loss: float, parameters: float, unique: float, epochs: float) -> float:
    """How much of the law's reducible loss a text has, from a measured loss in nats per reference token."""
    return max(0.05, (loss - IRREDUCIBLE) / reducible_loss(parameters, unique, epochs))


def forecast(text: TextProfile, machine: MachineProfile, minutes: float, scale: float = USUAL_SCALE) -> list[Forecast]:
    """The change with half and four times the minutes, each with its own plan."""
    now = _reducible_bits(text, plan_for(text, machine, minutes), scale)
    plans = ((factor * minutes, plan_for(text, machine, factor * minutes)) for factor in FACTORS)
    return [Forecast(other, _reducible_bits(text, plan, scale) - now) for other, plan in plans]


def _reducible_bits(text: TextProfile, plan: Plan, scale: float) -> float:
    """In bits per byte."""
    size = reference_bytes_per_token(text)
    return scale * reducible_loss(plan.parameters, text.train_bytes / size, plan.epochs) / size / math.log(2)


def describe(forecasts: Sequence[Forecast]) -> str:
    """The forecasts in one line."""
    parts = []
    for other in forecasts:
        if abs(other.change) < 0.005:
            parts.append(f"{other.minutes:g} min: about the same")
        else:
            direction = "less" if other.change < 0 else "more"
            parts.append(f"{other.minutes:g} min: about {abs(other.change):.2f} {direction}")
    return "bits per byte in " + "; in ".join(parts)


def reference_bytes_per_token(text: TextProfile) -> float:
    """Bytes per token with a vocabulary near the law's."""
    vocab = min(text.bytes_per_token, key=lambda size: abs(math.log(size / REFERENCE_VOCAB)))
    return text.bytes_per_token[vocab]


def forecast_run(
    bits_per_byte: float,
    bytes_per_token: float,
    vocab: int,
    parameters: float,
    unique: float,
    epochs: float,
    factors: Sequence[float] = FACTORS,
) -> list[float]:
    """Bits per byte that other training times would give after a finished run, each with a net of the best size.

    The run's own result shows how much reducible loss its text has, so this is nearer than a forecast before it.
    """
    # In tokens of the reference vocabulary, which are longer than those of a smaller one.
    lengthening = math.pow(REFERENCE_VOCAB / vocab, SHORTER_TOKENS) if vocab < REFERENCE_VOCAB else 1.0
    token_bytes = bytes_per_token * lengthening
    unique_tokens = unique / lengthening
    nats_per_bit = math.log(2)
    scale = text_scale(bits_per_byte * token_bytes * nats_per_bit, parameters, unique_tokens, epochs)
    now = _best_loss(parameters, unique_tokens, epochs, 1.0)
    changes = [scale * (_best_loss(parameters, unique_tokens, epochs, factor) - now) for factor in factors]
    return [bits_per_byte + change / token_bytes / nats_per_bit for change in changes]


def _best_loss(parameters: float, unique: float, epochs: float, factor: float) -> float:
    """The lowest loss of nets of other sizes with `factor` times the compute."""
    sizes = [parameters * math.pow(2, power / 4) for power in range(-12, 13)]
    return min(
        reducible_loss(size, unique, min(max(MAX_EPOCHS, epochs), factor * epochs * parameters / size))
        for size in sizes
    )
