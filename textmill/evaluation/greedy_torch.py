"""Greedy decoding of one text at a time, for tasks that compare what the model writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from textmill.devices import autocast
from textmill.evaluation.scorer_torch import TorchScorer
from textmill.models.cache_torch import Cache


@torch.inference_mode()
def write_greedily(scorer: TorchScorer, prompt: str, stops: Sequence[str], max_tokens: int) -> str:
    """The likeliest continuation, token by token, up to the first stop text; a long prompt loses its first tokens."""
    net = scorer.net
    tokenizer = scorer.tokenizer
    device = scorer.net.head.device
    max_tokens = min(max_tokens, scorer.positions - 1)
    ids = (tokenizer.encode(prompt) or [tokenizer.end])[-(scorer.positions - max_tokens) :]
    heads, width = net.cache_shape
    cache = Cache(net.shape.layers, heads, width, 1, scorer.positions, device, scorer.dtype)
    cache.read(torch.zeros(1, dtype=torch.long, device=device))
    written: list[int] = []
    new = torch.tensor([ids], device=device)
    with autocast(device, scorer.dtype):
        for position in range(len(ids), len(ids) + max_tokens):
            token = int(net.logits(net(new, cache=cache)[:, -1]).argmax())
            written.append(token)
            text = tokenizer.decode(written)
            if token == tokenizer.end or any(stop in text for stop in stops if stop):
                break
            new = torch.tensor([[token]], device=device)
            cache.extend(torch.tensor([[position]], device=device), position + 1)
    text = tokenizer.decode([token for token in written if token != tokenizer.end])
    return min((text.split(stop)[0] for stop in stops if stop), key=len, default=text)
