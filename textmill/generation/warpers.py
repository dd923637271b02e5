"""The sampling rules on logits, in the order of transformers; each is a pure function on the rows that use it.

What they keep of four tokens with the probabilities 0.5, 0.3, 0.15 and 0.05:

    top_k=3          0.5  0.3  0.15       the three most likely
    top_p=0.7        0.5  0.3             0.5 is less than 0.7, 0.5 + 0.3 is not
    min_p=0.2        0.5  0.3  0.15       at least 0.2 x 0.5
    typical_p=0.2         0.3             its surprise, -ln 0.3 = 1.20, is nearest to the mean surprise, 1.14

Shapes in names: N texts (rows), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from textmill.generation.gpu_sampling import MASKED, MIN_TEMPERATURE


def apply_repetition_penalty(logits_NV: Tensor, seen_NV: Tensor, penalty_N1: Tensor) -> Tensor:
    """Make seen tokens less likely: divide positive logits by the penalty, multiply negative ones."""
    return torch.where(seen_NV, torch.where(logits_NV < 0, logits_NV * penalty_N1, logits_NV / penalty_N1), logits_NV)


def apply_temperature(logits_NV: Tensor, temperature_N1: Tensor) -> Tensor:
    """Divide by the temperature; the largest logit is shifted to 0 first, so that nothing overflows."""
    return (logits_NV - logits_NV.amax(1, keepdim=True)) / temperature_N1.clamp(min=MIN_TEMPERATURE)


def keep_top_k(logits_NV: Tensor, k_N1: Tensor, largest_k: int) -> Tensor:
    """Keep the k most likely tokens, and those as likely as the last of them."""
    k_N1 = k_N1.long().clamp(max=logits_NV.shape[1])
    least_N1 = logits_NV.topk(min(largest_k, logits_NV.shape[1]), dim=1).values.gather(1, k_N1 - 1)
    return logits_NV.masked_fill(logits_NV < least_N1, MASKED)


def keep_top_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Nucleus sampling: keep the fewest most likely tokens whose probabilities add up to p, at least one."""
    sorted_NV, order_NV = logits_NV.sort(dim=1, descending=True, stable=True)
    probabilities_NV = sorted_NV.softmax(1)
    more_likely_NV = probabilities_NV.cumsum(1) - probabilities_NV  # the sum over more likely tokens
    is_beyond_NV = more_likely_NV >= p_N1
    is_beyond_NV[:, 0] = False
    return logits_NV.masked_fill(is_beyond_NV.scatter(1, order_NV, is_beyond_NV), MASKED)


def keep_min_p(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Keep tokens at least p times as likely as the most likely one."""
    probabilities_NV = logits_NV.softmax(1)
    return logits_NV.masked_fill(probabilities_NV < p_N1 * probabilities_NV.amax(1, keepdim=True), MASKED)


def keep_typical(logits_NV: Tensor, p_N1: Tensor) -> Tensor:
    """Typical sampling: keep the tokens nearest to the expected surprise whose probabilities add up to p."""
    logprobs_NV = logits_NV.log_softmax(1)
    probabilities_NV = logprobs_NV.exp()
    entropy_N1 = -(logprobs_NV * probabilities_NV).nansum(1, keepdim=True)
    distance_NV, order_NV = (-logprobs_NV - entropy_N1).abs().sort(dim=1, stable=True)
    is_below_p_NV = probabilities_NV.gather(1, order_NV).cumsum(1) < p_N1
    last_kept_N1 = is_below_p_NV.sum(1, keepdim=True).clamp(max=logits_NV.shape[1] - 1)
    is_far_NV = distance_NV > distance_NV.gather(1, last_kept_N1)
    return logits_NV.masked_fill(is_far_NV.scatter(1, order_NV, is_far_NV), MASKED)


Warper = Callable[[Tensor, Tensor], Tensor]
"""From the logits of some rows and the setting of each row to the changed logits."""
WARPERS: list[tuple[str, float, Callable[..., Tensor]]] = [
    ("temperature", 1.0, apply_temperature),
    ("top_k", 0, keep_top_k),
    ("top_p", 1.0, keep_top_p),
    ("min_p", 0.0, keep_min_p),
    ("typical_p", 1.0, keep_typical),
]
"""Setting, its neutral value, and the function; in the order of transformers."""
