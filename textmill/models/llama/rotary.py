"""Rotary positions without a framework: how fast each pair of channels turns, with the scalings of published configs.

Pair i of a head of D channels turns by position x base^(-2i / D). A scaling slows some pairs down, so that a model
trained on short contexts reads longer ones.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError

Array = NDArray[np.float32]

NUMBERS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""The scalings of transformers that textmill has, and the numbers that each needs."""
YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
DEFAULT_BASE = 10000.0


def read_rotary(hf: dict[str, Any], where: str, positions: int) -> tuple[float, str]:
    """The base and the scaling of a config.json, the scaling as JSON text; it is empty if there is none."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise TextmillError(f"{where}: rope_scaling is {given!r}; a config.json has an object there, or null")
    if any(isinstance(value, dict) for value in given.values()):
        raise TextmillError(
            f"{where}: rope_parameters has settings for {', '.join(sorted(given))}; textmill has one for all layers"
        )
    base = given.get("rope_theta", hf.get("rope_theta", DEFAULT_BASE))
    _check_number(base, "rope_theta", where)
    for factor in (given.get("partial_rotary_factor"), hf.get("partial_rotary_factor")):
        if factor not in (None, 1, 1.0):
            raise TextmillError(f"{where}: partial_rotary_factor is {factor}; textmill turns all channels of a head")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return float(base), ""
    if kind not in NUMBERS:
        raise TextmillError(f"{where}: rope_type is {kind!r}; textmill knows default, {', '.join(NUMBERS)}")
    given = dict(given)
    if "original_max_position_embeddings" in NUMBERS[kind]:
        original = given.get("original_max_position_embeddings", positions)
        given["original_max_position_embeddings"] = hf.get("original_max_position_embeddings", original)
    if kind == "yarn" and given.get("factor") is None:
        given["factor"] = positions / given["original_max_position_embeddings"]
    options = [name for name in YARN_OPTIONS if kind == "yarn" and given.get(name)]
    numbers = {name: given.get(name) for name in (*NUMBERS[kind], *options)}
    for name, value in numbers.items():
        _check_number(value, f"rope_scaling.{name}", where)
    truncate = {"truncate": False} if kind == "yarn" and given.get("truncate") is False else {}
    return float(base), json.dumps({"rope_type": kind, **numbers, **truncate}, sort_keys=True)


def _check_number(value: Any, name: str, where: str) -> None:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise TextmillError(f"{where}: {name} is {value!r}; a config.json has a number above 0 there")


def turning_rates(powers_D: Array, base: float, scaling: str) -> tuple[Array, float]:
    """The angle by which each pair of channels turns from one position to the next, and a factor of sine and cosine.

    `powers_D` are base^(2i / D). Rounding errors of a rate grow with the position, so the caller computes the powers
    as its reference does, and the steps below are in its order.
    """
    rates_D = np.float32(1.0) / powers_D
    if not scaling:
        return rates_D, 1.0
    numbers = json.loads(scaling)
    if numbers["rope_type"] == "linear":
        return rates_D / np.float32(numbers["factor"]), 1.0
    if numbers["rope_type"] == "llama3":
        return _llama3(rates_D, numbers), 1.0
    if numbers["rope_type"] == "yarn":
        return _yarn(powers_D, base, numbers), yarn_attention_factor(numbers)
    return rates_D, 1.0  # dynamic: it changes the rates only beyond the positions that a model has


def _llama3(rates_D: Array, numbers: dict[str, Any]) -> Array:
    """Slow pairs turn slower by the factor, fast ones as before, those in between change smoothly."""
    factor = np.float32(numbers["factor"])
    slow_D, fast_D, smooth_D = _llama3_bands(rates_D, numbers)
    scaled_D = np.where(slow_D, rates_D / factor, rates_D)
    between_D = (np.float32(1) - smooth_D) * scaled_D / factor + smooth_D * scaled_D
    return np.where(slow_D | fast_D, scaled_D, between_D)


def _llama3_bands(rates_D: Array, numbers: dict[str, Any]) -> tuple[Any, Any, Array]:
    """Which pairs are slow, which are fast, and how fast those in between are: from 0 to 1."""
    low, high = (np.float32(numbers[name]) for name in ("low_freq_factor", "high_freq_factor"))
    original = numbers["original_max_position_embeddings"]
    wavelengths_D = np.float32(2 * math.pi) / rates_D
    slow_D = wavelengths_D > original / numbers["low_freq_factor"]
    fast_D = wavelengths_D < original / numbers["high_freq_factor"]
    return slow_D, fast_D, (np.float32(original) / wavelengths_D - low) / (high - low)


def llama3_factors(rates_D: Array, numbers: dict[str, Any]) -> Array:
    """What llama3's scaling divides each rate by, as llama.cpp stores it."""
    slow_D, fast_D, smooth_D = _llama3_bands(rates_D, numbers)
    factor = np.float32(numbers["factor"])
    between_D = np.float32(1) / ((np.float32(1) - smooth_D) / factor + smooth_D)
    found: Array = np.where(slow_D, factor, np.where(fast_D, np.float32(1), between_D)).astype(np.float32)
    return found


def _yarn(powers_D: Array, base: float, numbers: dict[str, Any]) -> Array:
    """Pairs that turn often within the original context keep their rate, those that turn less than once are slowed."""
    width, original = 2 * len(powers_D), numbers["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = pair_with(numbers.get("beta_fast", 32)), pair_with(numbers.get("beta_slow", 1))
    if numbers.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    last = last + 0.001 if first == last else last
    ramp_D = np.clip((np.arange(len(powers_D), dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    kept_D = np.float32(1) - ramp_D
    one, factor = np.float32(1), np.float32(numbers["factor"])
    rates_D: Array = one / (factor * powers_D) * (one - kept_D) + one / powers_D * kept_D
    return rates_D


def yarn_attention_factor(numbers: dict[str, Any]) -> float:
    """The factor of sine and cosine, which makes attention sharper in longer contexts."""
    if "attention_factor" in numbers:
        return float(numbers["attention_factor"])

    def scale(strength: float) -> float:
        return 1.0 if numbers["factor"] <= 1 else 0.1 * strength * math.log(numbers["factor"]) + 1.0

    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return scale(numbers["mscale"]) / scale(numbers["mscale_all_dim"])
    return scale(1.0)
