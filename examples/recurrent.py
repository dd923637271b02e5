"""A recurrent net: instead of attention, each head keeps a matrix that decays and takes up the new key and value.

    textmill run quickstart model.family=./examples/recurrent.py model.size=small

This is Mamba-2's state-space form without its convolution. Training computes all tokens at once; generation keeps the
state of each text (`StateCache`), whose size does not grow with the text.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.config import ModelConfig
from textmill.models.base_torch import (
    BaseBlock,
    BaseNet,
    Context,
    Dropout,
    StateCache,
    causal_mask,
    document_mask,
    linear,
    new_embedding,
    split_heads,
)
from textmill.models.family import Shape as BaseShape
from textmill.models.weights import Weight

NAME = "recurrent"
SIZES = {"small": {"layers": 4, "heads": 4, "width": 128, "inner": 512, "positions": 256, "dropout": 0.0}}


@dataclass(frozen=True)
class Shape(BaseShape):
    dropout: float
    family: str = NAME
    attention_dropout = 0.0

    def weights(self) -> list[Weight]:
        width = self.width

        def matrix(name: str, outputs: int, inputs: int, split: int, **more: Any) -> Weight:
            return Weight(f"{name}.weight", (outputs, inputs), 0.02, decay=True, split=split, **more)

        table = {"by_token": True, "padded_rows": self.padded_vocab, "depth": self.layers + 1}
        weights = [matrix("embed", self.vocab, width, 0, **table)]
        for layer in range(self.layers):
            parts = {"parts": (width, width, width), "groups": self.heads}
            block = [
                Weight("norm_1.weight", (width,), ones=True),
                matrix("mixer.qkv", 3 * width, width, 0, muon=True, lora=True, **parts),
                matrix("mixer.decay", self.heads, width, 0),
                matrix("mixer.out", width, width, 1, muon=True, lora=True),
                Weight("norm_2.weight", (width,), ones=True),
                matrix("up", self.inner, width, 0, muon=True, lora=True),
                matrix("down", width, self.inner, 1, muon=True, lora=True),
            ]
            for weight in block:
                name = f"layers.{layer}.{weight.name}"
                weights.append(replace(weight, name=name, parameter=name, depth=self.layers - layer))
        return [*weights, Weight("norm.weight", (width,), ones=True)]


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    own = config.shape.model_dump(exclude_none=True) if not isinstance(config.shape, str) else {}
    sizes: dict[str, Any] = SIZES[config.size] | ({"positions": length} if length else {}) | own
    return Shape(vocab=vocab, eos_id=eos_id, **sizes)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    return Shape(**{name: hf[name] for name in Shape.__dataclass_fields__ if name != "family"})


def hf_config_of(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "model_type": NAME}


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    width = 32 * tensor
    return {"layers": 2, "heads": 2 * tensor, "width": width, "inner": 2 * width, "dropout": shape.dropout}


class Mixer(nn.Module):
    """The state of a head after token t is S_t = decay_t S_(t-1) + key_t value_t; its output is query_t S_t."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.head, self.layer = shape.width // shape.heads, layer
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.decay = nn.Linear(shape.width, shape.heads, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = split_heads(x, self.qkv, self.head, context)  # [N, H, T, D]
        logs = -F.softplus(linear(x, self.decay, context).float()).mT.cumsum(-1)  # [N, H, T]: log of all decays so far
        decays = (logs[..., :, None] - logs[..., None, :]).masked_fill(~context.extra, -torch.inf).exp()
        y = ((q @ k.mT) * decays.to(q.dtype)) @ v * self.head**-0.5
        if context.cache is not None:
            state = context.cache.state(self.layer)  # [N, H, D, D]
            y = y + (logs.exp()[..., None].to(q.dtype) * q) @ state.to(q.dtype) * self.head**-0.5
            last = decays[..., -1:, :].mT.to(k.dtype) * k  # what is left of each key at the end
            context.cache.store(self.layer, logs[..., -1:, None].exp() * state + last.mT @ v)
        return linear(y.transpose(1, 2).flatten(2), self.out, context)


class Block(BaseBlock):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.norm_1, self.mixer = nn.RMSNorm(shape.width), Mixer(shape, layer)
        self.norm_2 = nn.RMSNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        self.dropout_1, self.dropout_2 = Dropout(shape.dropout, site=2), Dropout(shape.dropout, site=3)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout_1(self.mixer(self.norm_1(x), context), context)
        inner = F.gelu(linear(self.norm_2(x), self.up, context))
        return x + self.dropout_2(linear(inner, self.down, context), context)  # type: ignore[no-any-return]


class Net(BaseNet):
    blocks_name, embedding_name = "layers", "embed"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed = new_embedding(shape.padded_vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def new_cache(self, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> StateCache:
        head = self.shape.width // self.shape.heads
        return StateCache(self.shape.layers, (self.shape.heads, head, head), slots, device)

    def embed_inputs(self, ids: Tensor, context: Context, documents: Tensor | None) -> tuple[Tensor, Context]:
        mask = causal_mask(ids.shape[1], ids.device) if documents is None else document_mask(documents)
        return self.embed(ids), context._replace(extra=mask)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]
