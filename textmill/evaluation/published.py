"""Published values, each with the data and the protocol that it was measured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Values = dict[str, dict[str, float]]
"""Metrics by model."""


@dataclass(frozen=True)
class PublishedResult:
    """Values that belong to one protocol card: every fact must be equal."""

    facts: dict[str, Any]
    values: Values


LAMBADA_SHA256 = "4aa8d02cd17c719165fc8a7887fddd641f43fcafa4b1c806ca8abc31fabdb226"

RESULTS = [
    # lm-evaluation-harness issue 2159; the last-token accuracy: transformers issue 13761.
    PublishedResult(
        {"protocol": "last word of each text", "sha256": LAMBADA_SHA256, "examples": 5153},
        {"GPT-2 124M": {"accuracy": 0.3256, "perplexity": 40.06, "last_token_accuracy": 0.4667}},
    )
]


def published_values(card: dict[str, Any]) -> Values:
    """The published values of a protocol card; empty if no value was measured in exactly this way."""
    for result in RESULTS:
        if all(card.get(key) == value for key, value in result.facts.items()):
            return result.values
    return {}
