"""Sections for looking at a model: measuring it, sampling from it, tracking its training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from textmill.config.section import Section, how


class EvaluateConfig(Section):
    """How a model is measured."""

    tasks: list[Literal["perplexity"]] = ["perplexity"]
    """perplexity: token, word and byte perplexity and bits per byte of a split."""
    split: Literal["train", "valid", "test"] = "valid"
    """Which split is measured."""
    batch: int = how(16, ge=1)
    """Windows at a time."""
    stride: int | None = Field(None, ge=1)
    """How far a window is from the next; the window's length if not said. Below it, tokens are judged with more context."""
    baselines: bool = True
    """Also measure a unigram and a bigram model, counted on the train split."""


class SampleConfig(Section):
    """How text is continued."""

    prompt: str | None = None
    """The text to continue; without one the model starts from nothing."""
    temperature: float = Field(0.8, ge=0)
    """0: always the likeliest token; higher: bolder."""
    top_k: int = Field(0, ge=0)
    """Choose among the k likeliest tokens only; 0: no limit."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together reach this probability."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1: tokens already there become less likely."""
    min_tokens: int = Field(0, ge=0)
    """No end of text before this many new tokens."""
    max_tokens: int = Field(200, ge=1)
    """New tokens at most."""
    slide: bool = True
    """Past the model's longest context, go on with the last half of it in view; false: stop there."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """The same seed gives the same text."""
    count: int = Field(1, ge=1, le=1000)
    """How many samples; each has its own seed, counted on from `sample.seed`."""


class TrackConfig(Section):
    """Where the numbers of training go besides the console and metrics.jsonl."""

    kinds: list[Literal["tensorboard", "wandb"]] = how([])
    """tensorboard, wandb (extra: textmill[track])."""
    project: str = how("textmill")
    """W&B's project."""
    name: str | None = how(None)
    """W&B's name of the run; the run folder's if not said."""
    offline: bool = how(True)
    """W&B writes to the run folder and sends nothing; `wandb sync` sends it later."""
