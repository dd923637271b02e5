"""Rotary positions (RoPE) without a framework: the frequency of each pair of channels, with published scalings.

At position p, pair i of a head of D channels is rotated by the angle p x f(i), where f(i) = base^(-2i / D) is its
frequency (transformers' `inv_freq`). A scaling lowers some frequencies, so that a model trained on short contexts reads
longer ones.
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


def rotary_frequencies(powers_D: Array, base: float, scaling: str) -> tuple[Array, float]:
    """The frequency of each pair of channels: its angle from one position to the next; and a factor of sine and cosine.

    `powers_D` are base^(2i / D). Rounding errors of a frequency grow with the position, so the caller computes the
    powers as its reference does, and the steps below are in its order.
    """
    frequencies_D = np.float32(1.0) / powers_D
    if not scaling:
        return frequencies_D, 1.0
    numbers = json.loads(scaling)
    if numbers["rope_type"] == "linear":
        return frequencies_D / np.float32(numbers["factor"]), 1.0
    if numbers["rope_type"] == "llama3":
        return _llama3(frequencies_D, numbers), 1.0
    if numbers["rope_type"] == "yarn":
        return _yarn(powers_D, base, numbers), yarn_attention_factor(numbers)
    return frequencies_D, 1.0  # dynamic: it changes frequencies only beyond the positions that a model has


def _llama3(frequencies_D: Array, numbers: dict[str, Any]) -> Array:
    """Low frequencies are divided by the factor, high ones stay, those in between change smoothly."""
    factor = np.float32(numbers["factor"])
    low_D, high_D, smooth_D = _llama3_bands(frequencies_D, numbers)
    scaled_D = np.where(low_D, frequencies_D / factor, frequencies_D)
    between_D = (np.float32(1) - smooth_D) * scaled_D / factor + smooth_D * scaled_D
    return np.where(low_D | high_D, scaled_D, between_D)


def _llama3_bands(frequencies_D: Array, numbers: dict[str, Any]) -> tuple[Any, Any, Array]:
    """Which pairs have a low frequency, which a high one, and where those in between are: from 0 (low) to 1 (high)."""
    low_factor, high_factor = (np.float32(numbers[name]) for name in ("low_freq_factor", "high_freq_factor"))
    original = numbers["original_max_position_embeddings"]
    wavelengths_D = np.float32(2 * math.pi) / frequencies_D
    low_D = wavelengths_D > original / numbers["low_freq_factor"]
    high_D = wavelengths_D < original / numbers["high_freq_factor"]
    return low_D, high_D, (np.float32(original) / wavelengths_D - low_factor) / (high_factor - low_factor)


def llama3_factors(frequencies_D: Array, numbers: dict[str, Any]) -> Array:
    """What llama3's scaling divides each frequency by, as llama.cpp stores it."""
    low_D, high_D, smooth_D = _llama3_bands(frequencies_D, numbers)
    factor = np.float32(numbers["factor"])
    between_D = np.float32(1) / ((np.float32(1) - smooth_D) / factor + smooth_D)
    factors_D: Array = np.where(low_D, factor, np.where(high_D, np.float32(1), between_D)).astype(np.float32)
    return factors_D


def _yarn(powers_D: Array, base: float, numbers: dict[str, Any]) -> Array:
    """Pairs that rotate often within the original context keep their frequency; for those that rotate less than once it
    is divided by the factor."""
    width = 2 * len(powers_D)
    original = numbers["original_max_position_embeddings"]

    def pair_with(rotations: float) -> float:
        """The pair that rotates so often within the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = pair_with(numbers.get("beta_fast", 32))
    last = pair_with(numbers.get("beta_slow", 1))
    if numbers.get("truncate", True):
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    last = min(last, width - 1)
    last = last + 0.001 if first == last else last
    ramp_D = np.clip((np.arange(len(powers_D), dtype=np.float32) - np.float32(first)) / np.float32(last - first), 0, 1)
    kept_D = np.float32(1) - ramp_D
    one = np.float32(1)
    factor = np.float32(numbers["factor"])
    frequencies_D: Array = one / (factor * powers_D) * (one - kept_D) + one / powers_D * kept_D
    return frequencies_D


def yarn_attention_factor(numbers: dict[str, Any]) -> float:
    """The factor of sine and cosine, which makes attention sharper in longer contexts."""
    if "attention_factor" in numbers:
        return float(numbers["attention_factor"])

    def scale(strength: float) -> float:
        return 1.0 if numbers["factor"] <= 1 else 0.1 * strength * math.log(numbers["factor"]) + 1.0

    if "mscale" in numbers and "mscale_all_dim" in numbers:
        return scale(numbers["mscale"]) / scale(numbers["mscale_all_dim"])
    return scale(1.0)
