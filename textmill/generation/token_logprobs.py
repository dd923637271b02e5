"""Log-probabilities of tokens and of the most likely tokens at their positions, before any sampling rule.

Shapes in names: N rows of logits, V vocabulary, K most likely tokens, T prompt tokens, E width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.generation.requests import Request, TopTokens
from textmill.models.base_torch import BaseNet

PROMPT_CHUNK = 128
"""Prompt tokens whose logits are computed at once."""


def top_logprobs(logits_NV: Tensor, chosen_N: Tensor, counts: list[int]) -> list[tuple[float, TopTokens]]:
    """Return each row's log-probability of the chosen token, and its `counts` most likely tokens."""
    logprobs_NV = logits_NV.float().log_softmax(1)
    values_NK, ids_NK = logprobs_NV.topk(min(max(counts), logprobs_NV.shape[1]), dim=1)
    chosen = logprobs_NV.gather(1, chosen_N[:, None])[:, 0].tolist()
    rows = zip(chosen, ids_NK.tolist(), values_NK.tolist(), counts, strict=True)
    return [(logprob, tuple(zip(ids[:count], values[:count], strict=True))) for logprob, ids, values, count in rows]


def compute_prompt_logprobs(
    net: BaseNet, vocab: int, request: Request, hidden_TE: Tensor | None
) -> tuple[tuple[float | None, TopTokens], ...]:
    """Return log-probabilities of a prompt's tokens; the first has none.

    `hidden_TE` are the hidden states of all prompt tokens but the last; None if there is a single token.
    """
    found: list[tuple[float | None, TopTokens]] = [(None, ())]
    if hidden_TE is None:
        return tuple(found)
    for begin in range(0, len(hidden_TE), PROMPT_CHUNK):
        logits_TV = net.logits(hidden_TE[begin : begin + PROMPT_CHUNK])[:, :vocab]
        next_ids = request.ids[begin + 1 : begin + 1 + len(logits_TV)]
        chosen_T = torch.tensor(next_ids, device=logits_TV.device)
        found += top_logprobs(logits_TV, chosen_T, [request.logprobs] * len(logits_TV))
    return tuple(found)
