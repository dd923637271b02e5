"""A model family in one file: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    textmill run quickstart model.family=./examples/mynet.py model.size=small

Copy it to begin a family of your own; docs/own-model.md says what each part is for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.config import ModelConfig
from textmill.errors import TextmillError
from textmill.models.base_torch import (
    BaseBlock,
    BaseNet,
    Context,
    Dropout,
    attention,
    linear,
    new_embedding,
    token_positions,
)
from textmill.models.family import Shape as BaseShape
from textmill.models.weights import Weight

NAME = "mynet"
"""The `model_type` in config.json."""
SIZES = {
    "small": {"layers": 4, "heads": 8, "kv_heads": 2, "width": 256, "inner": 704, "positions": 512, "dropout": 0.0}
}
"""The values of `model.size`."""


@dataclass(frozen=True)
class Shape(BaseShape):
    """The numbers that a net is built from; they decide whether a run may resume."""

    kv_heads: int
    dropout: float = 0.0
    family: str = NAME

    def weights(self) -> list[Weight]:
        """Every parameter: its size, how it starts, and what applies to it.

        `split` is the dimension that tensor-parallel ranks divide: 0 for matrices divided by outputs, 1 by inputs. The
        joined QKV matrix has three unequal parts, grouped by key head, so that a rank gets complete heads. `depth`
        orders the layers for `train.layer_decay`.
        """
        width, head = self.width, self.width // self.heads
        queries, keys = self.heads * head, self.kv_heads * head
        table = {"shape": (self.vocab, width), "std": 0.02, "by_token": True, "padded_rows": self.padded_vocab}

        def matrix(name: str, inputs: int, outputs: int, split: int, **layout: Any) -> Weight:
            flags = {"decay": True, "muon": True, "lora": True}
            return Weight(f"{name}.weight", (outputs, inputs), 0.02, split=split, **flags, **layout)  # type: ignore[arg-type]

        embedding: Any = {**table, "looked_up": True, "depth": self.layers + 1}
        weights = [Weight("embed.weight", decay=True, split=0, **embedding)]
        for layer in range(self.layers):
            name = f"layers.{layer}"
            block = [
                Weight(f"{name}.norm_1.weight", (width,), ones=True),
                matrix(
                    f"{name}.attention.qkv",
                    width,
                    queries + 2 * keys,
                    0,
                    parts=(queries, keys, keys),
                    groups=self.kv_heads,
                ),
                matrix(f"{name}.attention.out", queries, width, 1),
                Weight(f"{name}.norm_2.weight", (width,), ones=True),
                matrix(f"{name}.mlp.gate", width, self.inner, 0),
                matrix(f"{name}.mlp.up", width, self.inner, 0),
                matrix(f"{name}.mlp.down", self.inner, width, 1),
            ]
            weights += [replace(weight, depth=self.layers - layer) for weight in block]
        return [
            *weights,
            Weight("norm.weight", (width,), ones=True),
            Weight("unembed.weight", decay=True, split=0, **table),
        ]  # type: ignore[arg-type]

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return {"kv_heads": self.kv_heads, "inner": self.inner}


def shape_of(config: ModelConfig, *, vocab: int, eos_id: int, length: int | None = None) -> Shape:
    """The shape of the settings: `model.shape` overrides numbers of the size, with new keys under `extra`."""
    if isinstance(config.shape, str) or config.size not in SIZES:
        raise TextmillError(f"model.size: no size '{config.size}'; choose one of {', '.join(SIZES)}")
    own = config.shape.model_dump(exclude_none=True)
    numbers = {**SIZES[config.size], **({"positions": length} if length else {}), **own.pop("extra", {}), **own}
    if numbers["width"] % numbers["heads"] or numbers["heads"] % numbers["kv_heads"]:
        raise TextmillError("model.shape: kv_heads must divide heads, and heads must divide width")
    return Shape(vocab=vocab, eos_id=eos_id, **numbers)


def shape_of_hf(hf: dict[str, Any], where: str) -> Shape:
    """The shape of a config.json."""
    return Shape(**{name: hf[name] for name in Shape.__dataclass_fields__ if name != "family"})


def hf_config_of(shape: Shape) -> dict[str, Any]:
    """The config.json of a shape."""
    return {"model_type": NAME, **{name: value for name, value in asdict(shape).items() if name != "family"}}


def small_shape(shape: Shape, tensor: int) -> dict[str, Any]:
    """`model.shape` of a tiny net of the same kind, for `textmill verify`."""
    width = 8 * 4 * tensor
    numbers = {"layers": 2, "heads": 4 * tensor, "width": width, "inner": 2 * width, "dropout": shape.dropout}
    return {**numbers, "extra": {"kv_heads": 2 * tensor}}


class RMSNorm(nn.Module):
    """A norm by the root mean square, with a factor for each channel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    `context` has what all layers share. `linear` applies a matrix together with its LoRA adapter; `attention` uses the
    mask, or while generating the KV cache.
    """

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.head, self.repeat, self.layer = shape.width // shape.heads, shape.heads // shape.kv_heads, layer
        self.qkv = nn.Linear(shape.width, (shape.heads + 2 * shape.kv_heads) * self.head, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        cos, sin = context.extra
        qkv = linear(x, self.qkv, context).view(*x.shape[:2], -1, self.repeat + 2, self.head)
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in qkv.split([self.repeat, 1, 1], 3))
        q, k = (rotate(part, cos, sin) for part in (q, k))
        return linear(attention(q, k, v, context, self.layer), self.out, context)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of channels by its angle."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        inner = F.silu(linear(x, self.gate, context)) * linear(x, self.up, context)
        return linear(inner, self.down, context)


class Block(BaseBlock):
    """Attention and MLP; a dropout is a hash of positions, samples and its site in the block."""

    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.norm_1, self.attention = RMSNorm(shape.width), Attention(shape, layer)
        self.norm_2, self.mlp = RMSNorm(shape.width), MLP(shape)
        self.dropout_1, self.dropout_2 = Dropout(shape.dropout, site=2), Dropout(shape.dropout, site=3)

    def compute(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.dropout_1(self.attention(self.norm_1(x), context), context)
        return x + self.dropout_2(self.mlp(self.norm_2(x), context), context)  # type: ignore[no-any-return]


class Net(BaseNet):
    """The whole net; the three names tell where the blocks, the embedding and the head are."""

    blocks_name, embedding_name, head_name = "layers", "embed", "unembed"

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.embed = new_embedding(shape.padded_vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.unembed = nn.Linear(shape.width, shape.padded_vocab, bias=False)

    cache_shape = property(lambda self: (self.shape.kv_heads, self.shape.width // self.shape.heads))  # type: ignore[assignment]

    def embed_inputs(self, ids: Tensor, context: Context, documents: Tensor | None) -> tuple[Tensor, Context]:
        """The residual stream and the context of every block: rotary angles, and the mask that isolates documents."""
        places = token_positions(ids, context.cache, documents)
        head = self.shape.width // self.shape.heads
        rates = 10000.0 ** (-torch.arange(0, head, 2, device=ids.device) / head)
        angles = (places[..., None] * rates).unsqueeze(-3)  # [N or none, 1, T, head / 2]
        extra = angles.cos(), angles.sin()
        return self.embed(ids), Context(context.dropout_keys, context.cache, self.mask(documents, context), extra)

    def final_norm(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]
