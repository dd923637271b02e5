"""From scores to the next token: each rule a pure function on logits. Shapes in names: N samples, T tokens, V vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from textmill.config import SampleConfig
from textmill.counters import uniform_at
from textmill.errors import TextmillError

NEVER = -math.inf
COLDEST = 1e-30
"""Below this a temperature is no longer a number in single precision; the likeliest token is certain long before."""


def penalise(logits_NV: Tensor, seen_NT: Tensor, penalty: float) -> Tensor:
    """Make tokens already there less likely: positive scores are divided by the penalty, negative ones multiplied."""
    found_NT = logits_NV.gather(1, seen_NT)
    return logits_NV.scatter(1, seen_NT, torch.where(found_NT < 0, found_NT * penalty, found_NT / penalty))


def forbid(logits_NV: Tensor, id_: int) -> Tensor:
    """Make one token impossible."""
    return logits_NV.index_fill(1, torch.tensor([id_], device=logits_NV.device), NEVER)


def cool(logits_NV: Tensor, temperature: float) -> Tensor:
    """Sharpen below 1, flatten above; the likeliest token is moved to 0 first, so that no temperature overflows."""
    return (logits_NV - logits_NV.amax(1, keepdim=True)) / max(temperature, COLDEST)


def keep_top_k(logits_NV: Tensor, k: int) -> Tensor:
    """Only the k likeliest tokens, and those as likely as the last of them."""
    least_N1 = logits_NV.topk(min(k, logits_NV.shape[1]), dim=1).values[:, -1:]
    return logits_NV.masked_fill(logits_NV < least_N1, NEVER)


def keep_top_p(logits_NV: Tensor, p: float) -> Tensor:
    """Only the fewest likeliest tokens whose probability together reaches p; one at least."""
    ordered_NV, order_NV = logits_NV.sort(dim=1, descending=True, stable=True)
    chances_NV = ordered_NV.softmax(1)
    reached_NV = chances_NV.cumsum(1) - chances_NV >= p
    reached_NV[:, 0] = False
    return logits_NV.masked_fill(reached_NV.scatter(1, order_NV, reached_NV), NEVER)


def shaped(logits_NV: Tensor, seen_NT: Tensor, *, number: int, end: int, sample: SampleConfig) -> Tensor:
    """The scores after every rule, in transformers' order; `number` counts the new tokens before this one."""
    logits_NV = logits_NV.float()
    if sample.repetition_penalty != 1:
        logits_NV = penalise(logits_NV, seen_NT, sample.repetition_penalty)
    if number < sample.min_tokens:
        logits_NV = forbid(logits_NV, end)
    if sample.temperature == 0:
        return logits_NV
    logits_NV = cool(logits_NV, sample.temperature)
    if sample.top_k:
        logits_NV = keep_top_k(logits_NV, sample.top_k)
    if sample.top_p < 1:
        logits_NV = keep_top_p(logits_NV, sample.top_p)
    return logits_NV


def choose(logits_NV: Tensor, uniforms: list[float]) -> list[int]:
    """The token that each number from 0 to below 1 points at when the probabilities are laid end to end."""
    # On the CPU in double precision everywhere: one border between two tokens for one number on every machine.
    ends_NV = logits_NV.cpu().double().softmax(1).cumsum(1)
    points_N1 = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(1) * ends_NV[:, -1:]
    chosen: list[int] = torch.searchsorted(ends_NV, points_N1, right=True).squeeze(1).tolist()
    return chosen


def next_ids(logits_NV: Tensor, seen_NT: Tensor, *, seeds: list[int], number: int, end: int, sample: SampleConfig) -> list[int]:
    """The next token of each sample: a function of its scores, its seed and how many new tokens it has."""
    if not bool(torch.isfinite(logits_NV).all()):
        raise TextmillError("the model's scores are not finite; its weights are damaged or its training diverged; use an earlier --step")
    logits_NV = shaped(logits_NV, seen_NT, number=number, end=end, sample=sample)
    if sample.temperature == 0:
        likeliest: list[int] = logits_NV.argmax(1).tolist()
        return likeliest
    return choose(logits_NV, [uniform_at(seed, number) for seed in seeds])
