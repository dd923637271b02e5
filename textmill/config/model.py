"""The section for the model: its family, size, shape, initial weights and LoRA adapters."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, source


def is_family_file(family: str) -> bool:
    """True if `model.family` names a file of the user's own instead of a family that comes with textmill."""
    return family.endswith(".py")


class ShapeConfig(Section):
    """Numbers that override those of the named size."""

    layers: int | None = Field(None, ge=1)
    """Blocks."""
    heads: int | None = Field(None, ge=1)
    """Attention heads; they divide the width."""
    width: int | None = Field(None, ge=1)
    """Channels of the residual stream."""
    inner: int | None = Field(None, ge=1)
    """Channels inside the MLP; four times the width if not said."""
    positions: int | None = Field(None, ge=1)
    """Longest context in tokens."""
    activation: Literal["gelu_new", "gelu"] | None = None
    """gelu_new: tanh form (GPT-2); gelu: erf form (dsGPT2)."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Dropout on embeddings, attention and both residual branches."""
    extra: dict[str, Any] | None = None
    """Numbers that only a family of your own has: `extra: {kv_heads: 2}`."""


class LoraConfig(Section):
    """Adapters: the given weights stay, and a product of two narrow matrices beside each chosen one learns."""

    rank: int = Field(8, ge=1)
    """How narrow the matrices are."""
    alpha: float = Field(16.0, gt=0)
    """An adapter counts alpha / rank times."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """The share of what goes into an adapter that is dropped in training (PEFT's lora_dropout)."""
    targets: list[str] = Field(["all"], min_length=1)
    """Matrices that get one: all (every matrix of the blocks), or names and patterns such as c_attn, mlp, "h.3"."""

    @field_validator("targets", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class ModelConfig(Section):
    """Which net."""

    family: str = source("gpt2")
    """gpt2: a decoder that predicts the next token; or a file with a family of your own, such as ./mynet.py (docs/own-model.md).
    The file is code: name it in your own YAML or on the command line."""
    size: str = "small"
    """A named size: nano, micro, mini, small (124M), medium (350M), large (774M), xl (1.5B),
    dsgpt2-112m, dsgpt2-112m-half, dsgpt2-345m, megatron-345m, megatron-8.3b, yuan-4.7b;
    weights given by `model.init_from` bring their own."""
    shape: ShapeConfig | str = source(ShapeConfig())
    """Numbers that differ from the named size, or the path of a Hugging Face config.json to take them from.
    With `model.init_from` only dropout and positions may be said: more positions are interpolated, fewer are the first ones."""
    init_from: str | None = source()
    """Start from these weights: a run, a checkpoint, a Hugging Face model folder, or a hub name; of an adapter, merged into its base."""
    lora: LoraConfig | None = None
    """Train adapters on `model.init_from` instead of its weights: `lora: {rank: 8}`; a checkpoint then holds them alone, as PEFT does."""
