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

from textmill.config.distillation import DistilConfig
from textmill.config.evaluation import check_tasks
from textmill.config.presets import TRAIN_PRESETS, TrainPresetName, fill_from_preset, omit_preset_values
from textmill.config.section import Section, changeable, free_texts, path
from textmill.config.train_groups import (
    AverageConfig,
    BestConfig,
    ChatConfig,
    CheckpointsConfig,
    MaskedConfig,
    MultiTokenConfig,
    MuonConfig,
    PackedConfig,
    PaddedConfig,
    RangeTestConfig,
    SpikesConfig,
    StableConfig,
)
from textmill.errors import TextmillError

UNITS = ("steps", "epochs", "samples", "tokens", "minutes")
"""The keys that can set the run's length; one of them is used."""
AUTO_SETTINGS = ("learning_rate", "weight_decay", "batch", "warmup", "muon.adamw_rate_factor")
"""What `train.preset=auto` computes when a run starts, unless it is set."""
LAYOUT_GROUPS = ("packed", "padded", "masked")
"""Groups that are refused under another layout."""


class TrainConfig(Section):
    """Training: batches, length of the run, optimizer, schedule, checkpoints."""

    folder: str | None = path()
    """Where checkpoints and metrics are written; default: `run` under `folder`."""
    preset: TrainPresetName = changeable("none")  # the settings that it fills decide the result, not its name
    """Optimizer, learning rates, warm-up, batch and weight decay for pretraining. auto: by formula from width, tokens
    and epochs (Muon, or AdamW if `train.optimizer` is set); pretrain-nano, pretrain-muon, pretrain-adamw: as measured
    on a small and a 124M net. Explicit settings override the preset."""
    layout: Literal["packed", "padded", "features", "chat", "masked", "labelled"] = "packed"
    """packed: documents shuffled, joined and cut into windows of `train.length`; padded: one document per sample;
    features: the rows written by `tokens.kind=features`, or existing ones named by `tokens.use`;
    chat: conversations of `corpus.chat`, with loss only on the assistant's messages;
    masked: sentence pairs with masked tokens, for BERT, or existing ones in TFRecord files named by `tokens.use`;
    labelled: the examples of `corpus.labels`, to finetune BERT."""
    length: int | None = Field(None, ge=2)
    """Tokens in a sample; default: the model's longest context. If it is shorter than that of `model.size`, the model
    gets only this many positions."""
    batch: int = Field(32, ge=1)
    """Samples per optimizer step, over all devices (global batch)."""
    batch_rampup: list[int] = []
    """Start with smaller batches: start, increment, samples. `16,16,100000` grows from 16 samples per step to
    `train.batch`, 16 more at a time, over the first 100,000 samples, as Megatron's rampup-batch-size; default: no
    ramp-up."""
    steps: int = changeable(1000, ge=1)
    """Optimizer steps of the run; `train.epochs`, `samples`, `tokens` or `minutes` set its length instead."""
    epochs: float | None = changeable(None, gt=0)
    """Passes over the train split; fractions are allowed."""
    samples: int | None = changeable(None, ge=1)
    """Samples of the run, rounded down to a full step."""
    tokens: int | None = changeable(None, ge=1)
    """Tokens of the run, rounded down to a full step; every sample counts as `train.length` tokens."""
    minutes: float | None = changeable(None, gt=0)
    """Minutes of the entire command: the first steps are timed and give the number of steps, which a resume keeps."""
    max_epochs: float | None = changeable(None, gt=0)
    """The run ends after so many epochs at most: with `train.minutes`, even if there is time for more."""
    learning_rate: float = Field(6e-4, gt=0)
    """Highest learning rate."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate at the end of the schedule."""
    warmup: int | float = Field(0.05, ge=0)
    """Warm-up steps, or a fraction of the run when below 1 (with `train.minutes`: of an estimate after a few steps)."""
    warmup_shape: Literal["linear", "log"] = "linear"
    """How the learning rate rises: linear in the step, or in its logarithm from `train.min_learning_rate`, as
    DeepSpeed's WarmupLR."""
    schedule: Literal["cosine", "linear", "constant", "stable", "inverse_sqrt", "range_test"] = "cosine"
    """How the learning rate falls after the warm-up. stable: only in the last `train.stable.decay_fraction` of the run
    (warmup-stable-decay); inverse_sqrt: by one over the root of the step; range_test: it rises from
    `train.min_learning_rate` until training diverges, to find the highest usable rate."""
    decay_steps: int | None = changeable(None, ge=1)
    """The step at which the learning rate reaches its minimum; default: the last."""
    decay_samples: int | None = changeable(None, ge=1)
    """Samples after which the learning rate reaches its minimum, instead of `train.decay_steps`; the decay then follows
    the samples, which `train.batch_rampup` makes slower at first, as Megatron's lr-decay-samples."""
    stable: StableConfig = StableConfig()
    """Settings of `train.schedule=stable`."""
    range_test: RangeTestConfig = RangeTestConfig()
    """Settings of `train.schedule=range_test`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: Adam with decoupled weight decay; muon: orthogonalised momentum on the blocks' matrices, AdamW on the
    rest."""
    muon: MuonConfig = MuonConfig()
    """Settings of `train.optimizer=muon`."""
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """Adam's decay rates of the first and second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Adam's epsilon, added to the denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices and embeddings, or of the weights that `train.weight_decay_only` names."""
    weight_decay_only: list[str] = []
    """Weights that get weight decay instead of matrices and embeddings: patterns as in `train.freeze`, such as
    "*.weight"."""
    no_weight_decay: list[str] = []
    """Weights that get no weight decay, even if another setting names them: patterns such as wte, "*.bias"."""
    freeze: list[str] = []
    """Weights that are not trained: patterns for names in the checkpoint, without the model's prefix, such as wpe,
    "h.0.*", "*.mlp"."""
    layer_decay: float = Field(1.0, gt=0, le=1)
    """Layer-wise learning rate: block i of n uses the rate times this to the power n - i, embeddings one power more,
    the last LayerNorm the full rate."""
    embedding_rate_factor: float = Field(1.0, gt=0)
    """Learning rate of token embeddings that are not also the head, as a multiple of that of the other weights."""
    clip: float = Field(1.0, ge=0)
    """Gradient clipping: largest global gradient norm; 0: no clipping."""
    spikes: SpikesConfig = SpikesConfig()
    """Skipping updates when the loss spikes."""
    average: AverageConfig = AverageConfig()
    """Averaging the weights of the last steps."""
    distil: DistilConfig = DistilConfig()
    """Distillation from teacher models."""
    loss: Literal["token_mean", "sample_mean"] = "token_mean"
    """token_mean: mean over all loss tokens of the step; sample_mean: mean of each sample's mean."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """The fraction of each label that is spread over the whole vocabulary; in the training loss only."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log of the softmax's denominator, which keeps logits from drifting; in training only."""
    multi_token: MultiTokenConfig = MultiTokenConfig()
    """Multi-token prediction: a loss of the token after the next, in the first part of the run."""
    seed: int = Field(1234, ge=0, lt=2**63)
    """Determines the initial weights, the order of the data and dropout."""
    log_every: int = changeable(10, ge=1)
    """Steps between two lines of metrics."""
    save_every: int | Literal["epoch"] = changeable(500)
    """Steps between two checkpoints, or `epoch`: after each pass; the last step is always saved."""
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    """Which checkpoints are kept."""
    evaluate_every: int | Literal["epoch"] = changeable(500)
    """Steps between two losses on the valid split, or `epoch`: after each pass."""
    evaluate_batches: int | None = changeable(None, ge=1)
    """Batches of the valid split to evaluate; default: the full split."""
    tasks: list[str] = Field([], json_schema_extra={"changeable": True, "task_files": True})
    """Tasks that are measured during training and logged by name, such as lambada/accuracy; written as in
    `evaluate.tasks`."""
    tasks_every: int | Literal["epoch"] | None = changeable(None)
    """Steps between two measurements of `train.tasks`, or `epoch`; default: `train.evaluate_every`."""
    tasks_sample: int | None = changeable(None, ge=2)
    """Measure only this many examples of each task of `train.tasks`, the same random sample each time; default: all."""
    best: BestConfig = BestConfig()
    """Which checkpoint is the best one, and early stopping."""
    sample_prompts: list[str] = free_texts([])
    """Texts that each saved checkpoint continues, into samples.jsonl, to watch progress."""
    packed: PackedConfig = PackedConfig()
    """Settings of `train.layout=packed`."""
    padded: PaddedConfig = PaddedConfig()
    """Settings of `train.layout=padded`."""
    chat: ChatConfig = ChatConfig()
    """Settings of `train.layout=chat`."""
    masked: MaskedConfig = MaskedConfig()
    """Settings of `train.layout=masked`."""

    @property
    def unit(self) -> str:
        """The key that sets the run's length."""
        return next((name for name in UNITS[1:] if getattr(self, name) is not None), "steps")

    @property
    def tasks_interval(self) -> int | Literal["epoch"]:
        """Steps between two measurements of `train.tasks`, or epoch."""
        return self.tasks_every or self.evaluate_every

    @property
    def open_settings(self) -> tuple[str, ...]:
        """The settings that `train.preset=auto` has still to compute."""
        if self.preset != "auto":
            return ()
        given = {*self.model_fields_set, *(f"muon.{name}" for name in self.muon.model_fields_set)}
        given |= {"batch"} if self.batch_rampup else set()
        return tuple(key for key in AUTO_SETTINGS if key not in given)

    @property
    def sizes(self) -> list[int]:
        """The batch, its first size and its increment: what divides all of them divides the batch of every step."""
        return [self.batch, *self.batch_rampup[:2]]

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: Any) -> Any:
        return fill_from_preset(data, TRAIN_PRESETS)

    @model_validator(mode="before")
    @classmethod
    def _check_one_unit(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = [name for name in UNITS if data.get(name) is not None]
        if len(given) > 1:
            raise TextmillError(f"train.{given[1]}: the run's length is set by train.{given[0]} too; keep one of them")
        return data

    @model_serializer(mode="wrap")
    def _omit_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit default steps and values equal to the preset: they would override another unit or another preset.
        own = omit_preset_values(write(self), TRAIN_PRESETS[self.preset])
        omitted = {"steps"} if self.unit != "steps" else set()
        if "muon.adamw_rate_factor" in self.open_settings and "muon" in own:
            own["muon"] = {name: value for name, value in own["muon"].items() if name != "adamw_rate_factor"}
        omitted |= {*self.open_settings, *([] if own.get("muon", True) else ["muon"])}
        return {name: value for name, value in own.items() if name not in omitted}

    @model_validator(mode="after")
    def _check_batch_rampup(self) -> TrainConfig:
        if not self.batch_rampup:
            return self
        if len(self.batch_rampup) != 3 or min(self.batch_rampup) < 1:
            raise TextmillError(
                f"train.batch_rampup: found {self.batch_rampup}; give three whole numbers above 0: "
                "start, increment and samples"
            )
        start, increment, _ = self.batch_rampup
        if start >= self.batch:
            raise TextmillError(
                f"train.batch_rampup: starts with {start}, which is not below train.batch={self.batch}; "
                "lower it or remove it"
            )
        if (self.batch - start) % increment:
            fits = math.gcd(self.batch - start, increment)
            growth = f"the growth from {start} to train.batch={self.batch}"
            raise TextmillError(
                f"train.batch_rampup: an increment of {increment} does not divide {growth}; {fits} does"
            )
        return self

    @model_validator(mode="after")
    def _check_one_decay(self) -> TrainConfig:
        if self.decay_steps and self.decay_samples:
            raise TextmillError(
                f"train.decay_samples: the end of the decay is set by train.decay_steps={self.decay_steps} too; "
                "keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_layout_groups(self) -> TrainConfig:
        for group in LAYOUT_GROUPS:
            section = getattr(self, group)
            changed = [
                name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default
            ]
            if changed and self.layout != group:
                raise TextmillError(
                    f"train.{group}.{changed[0]}: is for train.layout={group}, found {self.layout}; remove it"
                )
        return self

    @model_validator(mode="after")
    def _check_distil_cache(self) -> TrainConfig:
        if self.distil.cache is not None:
            self.distil.check_samples(self.layout, self.minutes)
        return self

    @model_validator(mode="after")
    def _check_range_test_start(self) -> TrainConfig:
        if self.schedule == "range_test" and not self.min_learning_rate:
            raise TextmillError(
                "train.min_learning_rate: train.schedule=range_test starts from it; set it above 0, such as 1e-6"
            )
        return self

    @field_validator("tasks")
    @classmethod
    def _check_tasks(cls, tasks: list[str]) -> list[str]:
        return check_tasks(tasks, "train.tasks")

    @field_validator("save_every", "evaluate_every", "tasks_every")
    @classmethod
    def _check_interval(cls, value: int | str | None, info: ValidationInfo) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"train.{info.field_name}: found {value}; give a number of steps above 0, or epoch")
        return value

    @field_validator("betas")
    @classmethod
    def _check_betas(cls, value: list[float]) -> list[float]:
        if not all(0 <= beta < 1 for beta in value):
            raise TextmillError(f"train.betas: found {value}; both must be at least 0 and below 1, such as [0.9, 0.95]")
        return value
