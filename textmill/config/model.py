"""The section for the model: its family, size, shape, initial weights and LoRA adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, source

RESHAPABLE = ("dropout", "positions")
"""Numbers of a shape that given weights may change."""


class ShapeConfig(Section):
    """Numbers that override those of `model.size`."""

    layers: int | None = Field(None, ge=1)
    """Transformer blocks."""
    heads: int | None = Field(None, ge=1)
    """Attention heads; the width must be a multiple of this."""
    width: int | None = Field(None, ge=1)
    """Width of the residual stream (hidden size)."""
    inner: int | None = Field(None, ge=1)
    """Width inside the MLP; default: four times `model.shape.width`, in llama 8/3 of it."""
    positions: int | None = Field(None, ge=1)
    """Longest context in tokens."""
    activation: Literal["gelu_new", "gelu", "relu", "relu2", "silu", "tanh"] | None = None
    """gelu_new: tanh form (GPT-2); gelu: erf form (dsGPT2); relu2: squared ReLU. In llama it is the gate's: silu
    (SwiGLU). fp8 has gelu_new and gelu, in llama silu and relu2."""
    untied: bool | None = None
    """A head with weights of its own instead of those of the token embedding."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout rate on embeddings, attention weights and both residual branches."""
    attention_dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout rate on attention weights; default: `dropout`. On a GPU, 0 is faster: the fastest attention has none."""
    norm: Literal["post", "pre"] | None = None
    """bert: LayerNorms after each residual sum (post, as in BERT) or before attention and MLP (pre, as in
    Megatron-LM)."""
    pair_head: bool | None = None
    """bert: a second head that predicts a class for each sentence pair; default: true."""
    deep_init: bool | None = None
    """bert: start the last matrix of each residual branch smaller, by the root of twice the layers (Megatron-LM's
    deep-init)."""
    kv_heads: int | None = Field(None, ge=1)
    """llama: heads of keys and values, a divisor of the heads (grouped-query attention); default: as many."""
    head_width: int | None = Field(None, ge=2)
    """llama: channels of a head; default: the width divided by the heads."""
    qk_norm: bool | None = None
    """llama: normalise queries and keys of every head, as Qwen3 does."""
    qkv_bias: bool | None = None
    """llama: biases of queries, keys and values, as Qwen2 has them."""
    rotary_base: float | None = Field(None, gt=1)
    """llama: base of the rotary positions; longer contexts use a larger one."""
    extra: dict[str, Any] | None = None
    """Numbers that only your own model family has, such as `extra: {kv_heads: 2}`."""


class LoraConfig(Section):
    """LoRA: the given weights stay frozen; each target matrix gets a trained low-rank update A B."""

    rank: int = Field(8, ge=1)
    """Rank of the update: the inner width of A and B."""
    alpha: float = Field(16.0, gt=0)
    """The update is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout rate on the inputs of the adapters in training (PEFT's lora_dropout)."""
    targets: list[str] = Field(["all"], min_length=1)
    """Matrices that get an adapter: all (every matrix of the blocks), or names and patterns, such as c_attn, mlp,
    "h.3"."""

    @field_validator("targets", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ModelConfig(Section):
    """The model: family, size, initial weights, LoRA."""

    family: str = source("gpt2", suffix=".py")
    """gpt2, llama, bert or a Python file. gpt2: a decoder that predicts the next token; llama: one with rotary
    positions, RMSNorm and a gated MLP (Llama, Qwen2, Qwen3); bert: an encoder that predicts masked tokens; or a Python
    file with your own model family, such as ./mynet.py (docs/own-model.md). The file is executed, so only your own YAML
    or the command line may name it."""
    size: str = "small"
    """A named size, such as small (124M) or medium (350M). Of gpt2: nano, micro, mini, small (124M), medium (350M),
    large (774M), xl (1.5B), dsgpt2-112m, dsgpt2-112m-half, dsgpt2-345m, megatron-345m, megatron-8.3b, yuan-4.7b; of
    llama: nano to xl like GPT-2's, smollm2-135m, smollm2-360m, qwen2.5-0.5b, qwen2.5-1.5b, qwen3-0.6b, tinyllama-1.1b,
    llama-3.2-1b; of bert: tiny, mini, small (29M), medium (41M), base (110M), large (335M), megatron-345m. Not used
    with `model.init_from`: its weights have their own size."""
    shape: ShapeConfig | str = source(ShapeConfig())
    """Numbers that differ from `model.size`, or the path of a Hugging Face config.json that has all of them.
    With `model.init_from` only dropout and positions can be set; more positions are interpolated from the given ones,
    fewer keep the first ones."""
    init_from: str | None = source()
    """Start from these weights (finetuning): a run, checkpoint, Hugging Face model folder, hub name or URL, or a
    model file that `textmill import` reads (GGUF, ckpt.pt ...); a LoRA adapter is merged into its base model."""
    init_layers: list[int] = []
    """Use only these blocks of `model.init_from`, counted from 0 and in this order, such as 0,2,4,7,9,11; a block may
    occur twice. Default: all blocks."""
    lora: LoraConfig | None = None
    """Train LoRA adapters on `model.init_from` instead of its weights, such as `lora: {rank: 8}`; a checkpoint then
    contains only the adapters, in PEFT's format."""
