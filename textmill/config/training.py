"""The section for training."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from textmill.config.presets import TRAIN_PRESETS, TrainPresetName, filled
from textmill.config.section import Section, how, place, texts
from textmill.errors import TextmillError

UNITS = ("steps", "epochs", "samples", "tokens")
"""How long a run is, in the words of one of them."""
LAYOUT_OF = {"apart": "packed", "tail": "packed", "long": "padded", "close": "padded"}
"""Settings that only one layout reads."""


class TrainConfig(Section):
    """What is trained, on what, for how long."""

    folder: str | None = place()
    """Where checkpoints and metrics go; `run` under `folder` if not said."""
    preset: TrainPresetName = how("none")  # what comes out is decided by the settings that it fills
    """Optimizer, rates, warm-up and batch for pretraining, by what was measured: pretrain-nano for a CPU, pretrain-muon and
    pretrain-adamw for a GPU; what is said beside it stands above it."""
    layout: Literal["packed", "padded", "features", "chat"] = "packed"
    """packed: documents shuffled, joined and cut into windows of `train.length`; padded: one document a sample;
    features: the rows that `tokens.kind=features` made, or existing ones that `tokens.use` names;
    chat: whole conversations of `corpus.chat`, each by itself, with loss on what the assistant says."""
    pack: bool = True
    """chat: several short conversations in a sample; false: one each, as dsGPT2 has it."""
    cut: Literal["start", "end"] = "start"
    """chat: which side a conversation longer than `train.length` loses; without its start the last answer stays, and where it stops."""
    apart: bool = False
    """packed: keep documents apart: attention and positions begin anew with each, and none asks for the next one's first token."""
    tail: Literal["keep", "drop"] = "keep"
    """packed: whether the tokens after the last whole window of an epoch are kept, filled up from its beginning, or dropped."""
    long: Literal["split", "cut"] = "split"
    """padded: what becomes of a document longer than `train.length`: several samples, or its beginning alone."""
    close: bool = False
    """padded: end a cut sample with the end-of-text token, as dsGPT2 does."""
    length: int | None = Field(None, ge=2)
    """Tokens in a sample; the model's positions if not said. A named size trained on less has no more positions than this."""
    batch: int = Field(32, ge=1)
    """Samples a step, over all devices."""
    ramp: list[int] = []
    """Begin with smaller batches: start, increment, samples, such as `16,16,100000`: from 16 samples a step to `train.batch`, 16 more at
    a time, over the first 100,000 samples, as Megatron's rampup-batch-size."""
    steps: int = how(1000, ge=1)
    """Optimizer steps of the whole run; or say its length in one of the next three."""
    epochs: float | None = how(None, gt=0)
    """Passes over the train split; parts of one, too."""
    samples: int | None = how(None, ge=1)
    """Samples of the whole run, down to a whole step."""
    tokens: int | None = how(None, ge=1)
    """Tokens of the whole run, down to a whole step: every sample counts `train.length` of them."""
    learning_rate: float = Field(6e-4, gt=0)
    """Highest learning rate."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Where the schedule ends."""
    warmup: int | float = Field(0.05, ge=0)
    """Steps of warm-up, or a share of the run when below 1."""
    warmup_shape: Literal["linear", "log"] = "linear"
    """How the rate rises: in a line, or by the logarithm of the step from `train.min_learning_rate`, as DeepSpeed's WarmupLR does."""
    schedule: Literal["cosine", "linear", "constant", "stable", "inverse_sqrt", "range_test"] = "cosine"
    """How the learning rate falls after the warm-up: stable: only in the last `train.decay_share` of the way (warmup-stable-decay);
    inverse_sqrt: by one over the root of the step; range_test: it rises from `train.min_learning_rate` until the net bears no more."""
    decay_steps: int | None = how(None, ge=1)
    """The step at which the rate meets its minimum; the last if not said."""
    decay_share: float = how(0.2, gt=0, le=1)
    """stable: the share of the way in which the rate falls."""
    range_steps: int = Field(2000, ge=1)
    """range_test: steps in which the rate rises once by `train.range_rate` times the minimum."""
    range_rate: float = Field(1.0, gt=0)
    """range_test: how fast it rises."""
    range_stairs: bool = False
    """range_test: in steps of `train.range_steps` instead of a line."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: Adam with decoupled weight decay; muon: orthogonal momentum on the blocks' matrices, AdamW on the rest."""
    rest_rate: float = Field(1.0, gt=0)
    """muon: the rate of embeddings, biases and LayerNorms, as a multiple of `train.learning_rate`."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """muon: what each step keeps of the mean of the gradients before it."""
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """Adam's two decay rates."""
    epsilon: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.1, ge=0)
    """Decay of matrices and embeddings, or of what `train.decayed` names."""
    decayed: list[str] = []
    """Weights that are decayed in place of matrices and embeddings: patterns as in `train.freeze`, such as "*.weight"."""
    undecayed: list[str] = []
    """Weights that are not decayed, whatever else names them: patterns such as wte, "*.bias"."""
    freeze: list[str] = []
    """Weights that stay as they are: patterns over a checkpoint's names without their prefix, such as wpe, "h.0.*", "*.mlp"."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Block i learns at the rate times this to the power of (layers - i), embeddings at one power more, the last LayerNorm at the rate."""
    clip: float = Field(1.0, ge=0)
    """Largest global gradient norm; 0: no clipping."""
    spike: float | None = how(None, gt=0)
    """Leave out the update of a step whose loss is so many robust deviations above the median of the last `train.spike_window` updates'
    losses, such as 6; off if not said."""
    spike_window: int = how(128, ge=2)
    """spike: updates whose losses are the level; before there are as many, none is left out."""
    loss: Literal["token_mean", "sample_mean"] = "token_mean"
    """token_mean: summed loss over all asked tokens of the step; sample_mean: the mean of each sample's mean."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """The share of each label that is spread over the whole vocabulary; training's loss alone."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared logarithm of the softmax's denominator, which keeps scores from drifting; training's loss alone."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Decides the first weights, the order of the data and dropout."""
    log_every: int = how(10, ge=1)
    """Steps between two lines of metrics."""
    save_every: int | Literal["epoch"] = how(500)
    """Steps between two checkpoints, or `epoch`: after each pass; the last step is always saved."""
    evaluate_every: int | Literal["epoch"] = how(500)
    """Steps between two losses on the valid split, or `epoch`: after each pass."""
    evaluate_batches: int | None = how(None, ge=1)
    """Batches of the valid split to look at; the whole split if not said."""
    keep: int = how(2, ge=1)
    """How many of the newest checkpoints stay; the best one and those of `train.keep_every` stay besides."""
    keep_every: int | None = how(None, ge=1)
    """Checkpoints whose step this divides are never pruned."""
    file_gb: float = how(5.0, gt=0)
    """Largest file of a checkpoint in GB; a larger state is written as several, which transformers opens as well."""
    prompts: list[str] = texts([])
    """Texts that each saved checkpoint continues, into samples.jsonl, so that progress can be read."""

    @property
    def unit(self) -> str:
        """The word in which the run's length was said."""
        return next((name for name in UNITS[1:] if getattr(self, name) is not None), "steps")

    @property
    def sizes(self) -> list[int]:
        """The batch, and what it begins with and grows by: what divides them divides the batch of every step."""
        return [self.batch, *self.ramp[:2]]

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return filled(data, TRAIN_PRESETS)

    @model_validator(mode="before")
    @classmethod
    def _one_unit(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        said = [name for name in UNITS if data.get(name) is not None]
        if len(said) > 1:
            raise TextmillError(f"train.{said[1]}: the run's length is said in train.{said[0]} too; keep one of them")
        return {name: value for name, value in data.items() if name != "steps" or value is not None}

    @model_serializer(mode="wrap")
    def _leave_to_unit_and_preset(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Steps that nobody said are not written beside what was said in their place, nor what the preset says beside the preset.
        said = TRAIN_PRESETS[self.preset]
        own = {
            name: value for name, value in write(self).items() if name not in said or getattr(self, name) != said[name]
        }
        return {name: value for name, value in own.items() if name != "steps" or self.unit == "steps"}

    @model_validator(mode="after")
    def _grows_evenly(self) -> TrainConfig:
        if not self.ramp:
            return self
        if len(self.ramp) != 3 or min(self.ramp) < 1:
            raise TextmillError(
                f"train.ramp: found {self.ramp}; give three whole numbers above 0: start, increment and samples"
            )
        start, increment, _ = self.ramp
        if start >= self.batch:
            raise TextmillError(
                f"train.ramp: starts with {start}, which is not below train.batch={self.batch}; lower it, or take it out"
            )
        if (self.batch - start) % increment:
            fits = math.gcd(self.batch - start, increment)
            way = f"the way from {start} to train.batch={self.batch}"
            raise TextmillError(f"train.ramp: an increment of {increment} does not divide {way}; {fits} does")
        return self

    @model_validator(mode="after")
    def _read_by_the_layout(self) -> TrainConfig:
        for name, layout in LAYOUT_OF.items():
            if self.layout != layout and getattr(self, name) != type(self).model_fields[name].default:
                raise TextmillError(f"train.{name}: is for train.layout={layout}, found {self.layout}; take it out")
        if self.close and self.long != "cut":
            raise TextmillError(
                "train.close: ends samples that were cut, and train.long=split cuts none off; set train.long=cut"
            )
        return self

    @model_validator(mode="after")
    def _begins_somewhere(self) -> TrainConfig:
        if self.schedule == "range_test" and not self.min_learning_rate:
            raise TextmillError(
                "train.min_learning_rate: train.schedule=range_test rises from it; set it above 0, such as 1e-6"
            )
        return self

    @field_validator("save_every", "evaluate_every")
    @classmethod
    def _some(cls, value: int | str, info: ValidationInfo) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"train.{info.field_name}: found {value}; give a number of steps above 0, or epoch")
        return value

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: list[float]) -> list[float]:
        if not all(0 <= beta < 1 for beta in value):
            raise TextmillError(f"train.betas: found {value}; both lie from 0 to below 1, such as [0.9, 0.95]")
        return value
