"""A net with the names, the layout and the arithmetic of nanoGPT's model.py, written from its description."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn = nn.Linear(width, 3 * width, bias=bias)
        self.c_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            part.view(samples, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.c_attn(x).split(width, dim=2)
        )
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(samples, length, width))


class Mlp(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias=bias)
        self.c_proj = nn.Linear(4 * width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(nn.functional.gelu(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.attn, self.mlp = Attention(width, heads, bias), Mlp(width, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    def __init__(self, args: dict[str, Any]) -> None:
        super().__init__()
        width, bias = args["n_embd"], args["bias"]
        blocks = [Block(width, args["n_head"], bias) for _ in range(args["n_layer"])]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(args["vocab_size"], width),
                "wpe": nn.Embedding(args["block_size"], width),
                "h": nn.ModuleList(blocks),
                "ln_f": nn.LayerNorm(width, bias=bias),
            }
        )
        self.lm_head = nn.Linear(width, args["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.transformer
        x = parts["wte"](ids) + parts["wpe"](torch.arange(ids.shape[1]))
        for block in parts["h"]:
            x = block(x)
        return self.lm_head(parts["ln_f"](x))
