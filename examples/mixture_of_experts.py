"""A mixture of experts: each token's MLP is the two experts that a router finds best; a loss balances their load.

All experts are computed for all tokens, with weight 0 where they were not chosen: simple, and the same on any mesh.
    textmill run quickstart model.family=./examples/mixture_of_experts.py model.size=small
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
    attention,
    linear,
    new_embedding,
    split_heads,
    token_positions,
)
from textmill.models.family import Shape as BaseShape
from textmill.models.weights import Weight

NAME = "mixture_of_experts"
BALANCE = 0.01  # weight of the loss that balances the load, as in the Switch Transformer
SIZES = {"small": {"layers": 4, "heads": 4, "width": 128, "inner": 256, "positions": 256, "experts": 4, "dropout": 0.0}}


@dataclass(frozen=True)
class Shape(BaseShape):
    experts: int
    dropout: float
    family: str = NAME
    attention_dropout = 0.0

    def weights(self) -> list[Weight]:
        def matrix(name: str, outputs: int, inputs: int, split: int | None, **more: Any) -> Weight:
            return Weight(f"{name}.weight", (outputs, inputs), 0.02, decay=True, split=split, **more)

        width, inner = self.width, self.inner
        table = {"by_token": True, "padded_rows": self.padded_vocab, "depth": self.layers + 1}
        weights = [matrix("embed", self.vocab, width, 0, **table)]
        weights.append(Weight("places.weight", (self.positions, width), 0.02, by_position=True, depth=self.layers + 1))
        for layer in range(self.layers):
            parts = {"parts": (width, width, width), "groups": self.heads}
            block = [
                Weight("norm_1.weight", (width,), ones=True),
                matrix("attention.qkv", 3 * width, width, 0, muon=True, lora=True, **parts),
                matrix("attention.out", width, width, 1, muon=True, lora=True),
                Weight("norm_2.weight", (width,), ones=True),
                matrix("router", self.experts, width, None),
            ]
            for number in range(self.experts):
                block.append(matrix(f"experts.{number}.up", inner, width, 0, muon=True, lora=True))
                block.append(matrix(f"experts.{number}.down", width, inner, 1, muon=True, lora=True))
            for weight in block:
                name = f"layers.{layer}.{weight.name}"
                weights.append(replace(weight, name=name, parameter=name, depth=self.layers - layer))
        return [*weights, Weight("norm.weight", (width,), ones=True)]


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    own = {} if isinstance(config.shape, str) else config.shape.model_dump(exclude_none=True)
    sizes: dict[str, Any] = SIZES[config.size] | ({"positions": length} if length else {}) | own.pop("extra", {}) | own
    return Shape(vocab=vocab, eos_id=eos_id, **sizes)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    return Shape(**{name: hf[name] for name in Shape.__dataclass_fields__ if name != "family"})


def hf_config_of(shape: Shape) -> dict[str, Any]:
    return {**asdict(shape), "model_type": NAME}


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    sizes = {"layers": 2, "heads": 2 * tensor, "width": 32 * tensor, "inner": 64 * tensor}
    return {**sizes, "dropout": shape.dropout, "extra": {"experts": 4}}


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.head, self.layer = shape.width // shape.heads, layer
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = split_heads(x, self.qkv, self.head, context)
        return linear(attention(q, k, v, context, self.layer), self.out, context)


class Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return linear(F.gelu(linear(x, self.up, context)), self.down, context)


class Block(BaseBlock):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.RMSNorm(shape.width), Attention(shape, layer)
        self.norm_2, self.router = nn.RMSNorm(shape.width), nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))
        self.dropout_1, self.dropout_2 = Dropout(shape.dropout, site=2), Dropout(shape.dropout, site=3)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout_1(self.attention(self.norm_1(x), context), context)
        y = self.norm_2(x)
        chances = self.router(y).float().softmax(-1)
        best, chosen = chances.topk(2, -1)
        gates = torch.zeros_like(chances).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        load, chance = (gates > 0).float().mean((0, 1)) / 2, chances.mean((0, 1))
        self.auxiliary_loss = BALANCE * len(self.experts) * (load * chance).sum()
        mixed = sum(gates[..., n, None].to(y.dtype) * expert(y, context) for n, expert in enumerate(self.experts))
        return x + self.dropout_2(mixed, context)  # type: ignore[no-any-return]


class Net(BaseNet):
    blocks_name, embedding_name = "layers", "embed"
    has_auxiliary_loss = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed = new_embedding(shape.padded_vocab, shape.width)
        self.places = new_embedding(shape.positions, shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def embed_inputs(self, ids: Tensor, context: Context, documents: Tensor | None) -> tuple[Tensor, Context]:
        places = token_positions(ids, context.cache, documents)
        return self.embed(ids) + self.places(places), context._replace(mask=self.mask(documents, context))

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]
