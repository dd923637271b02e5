"""Sections for looking at a model: measuring it, sampling from it, tracking its training."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from textmill.config.section import Section, changeable, path, source
from textmill.errors import TextmillError

TASKS = Path(__file__).parent.parent / "evaluation" / "tasks"


def task_names() -> list[str]:
    """The evaluation tasks: one file each."""
    return sorted(file.stem for file in TASKS.glob("*.py") if file.stem != "__init__")


class EvaluateConfig(Section):
    """How a model is measured."""

    tasks: list[str] = ["perplexity"]
    """What to measure, each the name of a file in textmill/evaluation/tasks.
    perplexity: token, word and byte perplexity and bits per byte of a split."""
    split: Literal["train", "valid", "test"] = "valid"
    """Which split is measured."""
    batch: int = changeable(16, ge=1)
    """Windows at a time."""
    stride: int | None = Field(None, ge=1)
    """How far a window is from the next; the window's length if not said. Below it, tokens are judged with more context."""
    baselines: bool = True
    """Also measure a unigram and a bigram model, counted on the train split."""

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        known = task_names()
        if not tasks:
            raise TextmillError(f"evaluate.tasks: is empty; choose from {', '.join(known)}")
        if unknown := [task for task in tasks if task not in known]:
            raise TextmillError(f"evaluate.tasks: unknown task '{unknown[0]}'; choose from {', '.join(known)}")
        return tasks


class SampleConfig(Section):
    """How text is continued."""

    prompt: str | None = None
    """The text to continue; without one the model starts from nothing."""
    prompts_file: str | None = source()
    """A file of texts to continue: one a line, or JSON lines with a key "prompt"; each answer is a line of JSON."""
    temperature: float = Field(0.8, ge=0)
    """0: always the likeliest token; higher: bolder."""
    top_k: int = Field(0, ge=0)
    """Choose among the k likeliest tokens only; 0: no limit."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Choose among the likeliest tokens that together reach this probability."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Choose among tokens at least this many times as likely as the likeliest; 0: no limit."""
    typical_p: float = Field(1.0, gt=0, le=1)
    """Choose among the tokens nearest to the expected surprise that together reach this probability."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Above 1: tokens already there, the prompt's too, become less likely."""
    presence_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken off the score of every token that is in the new text."""
    frequency_penalty: float = Field(0.0, ge=-100, le=100)
    """Taken off the score of a token for each time that it is in the new text."""
    min_tokens: int = Field(0, ge=0)
    """No end of text before this many new tokens."""
    max_tokens: int = Field(200, ge=1)
    """New tokens at most."""
    stop: list[str] = Field([], json_schema_extra={"free_texts": True})
    """The text ends before the first of these."""
    beams: int = Field(1, ge=1, le=64)
    """Above 1: the likeliest text that a search with so many beams finds; nothing is left to chance."""
    length_penalty: float = Field(1.0, ge=-100, le=100)
    """Of beam search: above 0 longer texts are favoured, below 0 shorter ones."""
    slide_context: bool = True
    """Past the model's longest context, go on with the last half of it in view; false: stop there."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """The same seed gives the same text."""
    count: int = Field(1, ge=1, le=1000)
    """How many samples; each has its own seed, counted on from `sample.seed`."""
    batch: int = changeable(16, ge=1, le=4096)
    """Texts that go through the model at a time; each takes memory for its keys and values."""


class ExportConfig(Section):
    """A model as a folder for other tools."""

    folder: str | None = path()
    """The folder to write: config.json, model.safetensors, the tokenizer's files."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What the weights are rounded to."""


class WandbConfig(Section):
    """Settings of `track.kinds=wandb`."""

    project: str = changeable("textmill")
    """Project on W&B."""
    name: str | None = changeable(None)
    """Name of the run on W&B; default: the run folder's name."""
    offline: bool = changeable(True)
    """Write to the run folder and send nothing; `wandb sync` sends it later."""


class TrackConfig(Section):
    """Where training metrics are sent, in addition to the console and metrics.jsonl."""

    kinds: list[Literal["tensorboard", "wandb"]] = changeable([])
    """tensorboard, wandb (extra: textmill[track])."""
    wandb: WandbConfig = changeable(WandbConfig())
    """Settings of Weights & Biases."""
