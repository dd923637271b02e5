"""The section for training: its sub-sections first, then `TrainConfig` and the presets (`train.preset`)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from textmill.config.own_files import is_own_file
from textmill.config.section import (
    Section,
    changeable,
    fill_from_preset,
    free_texts,
    models,
    omit_preset_values,
    path,
    source,
)
from textmill.config.usage import check_tasks
from textmill.errors import TextmillError

EMA_STEPS_FROM = 10
"""A `train.ema_window` from this on is in steps, not in epochs."""


class PackedConfig(Section):
    """Settings of `train.layout=packed`."""

    isolate_documents: bool = False
    """Attention and positions start again at each document, and no document predicts the next one's first token."""


class PaddedConfig(Section):
    """Settings of `train.layout=padded`."""

    long_documents: Literal["split", "truncate", "end"] = "split"
    """A document longer than `train.length`: split into several samples; truncate to its beginning; or end: that, with
    the end-of-text token last, as dsGPT2 does."""


class ChatConfig(Section):
    """Settings of `train.layout=chat`."""

    pack: bool = True
    """Put several short conversations into one sample; false: one conversation per sample, as dsGPT2 does."""


class MaskedConfig(Section):
    """Settings of `train.layout=masked`."""

    pairs: Literal["next", "order", "none"] = "next"
    """Segments of a sample. next: two, the second from another document in half of the samples (BERT's next sentence);
    order: two, swapped in half of the samples (ALBERT's sentence order); none: one, of full sentences (RoBERTa)."""
    probability: float = Field(0.15, gt=0, lt=1)
    """The fraction of a sample's tokens that is predicted; of these, 80 % are masked, 10 % kept, 10 % replaced."""
    max_predictions: int | None = Field(None, ge=1)
    """Most predicted tokens in a sample, such as 20 for `train.length=128`; default: no limit."""
    whole_words: bool = True
    """Mask all tokens of a word or none; false: every token on its own."""
    short_probability: float = Field(0.1, ge=0, le=1)
    """Pairs: the fraction of samples that are cut to a random shorter length."""
    counts: str | None = source()
    """Mask rare tokens more often: a file of token counts, written by `textmill show WHERE --counts FILE`. A token seen
    n times has the weight n to the power of -0.7; default: all tokens are equally likely."""


class MuonConfig(Section):
    """Settings of `train.optimizer=muon`."""

    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the running mean of the gradients."""
    adamw_rate_factor: float = Field(1.0, gt=0)
    """Learning rate of the weights that AdamW updates (embeddings, biases, LayerNorms), as a multiple of
    `train.learning_rate`."""


VALID_METRICS = ("valid_loss", "valid_accuracy", "valid_bits_per_byte", "valid_pair_loss", "valid_pair_accuracy")
"""What is measured on the valid split; the last two with labels of sentence pairs."""


class BestConfig(Section):
    """Which checkpoint is the best one, and when a run ends early because there is no better one."""

    metric: str = changeable("valid_loss")
    """The metric of metrics.jsonl that chooses the best checkpoint: valid_loss, valid_accuracy ..., or one of
    `train.tasks`, such as lambada/accuracy. Of losses, perplexities, bits and errors the lowest is the best."""
    patience: int | None = changeable(None, ge=1)
    """Early stopping: end the run after this many measurements of the metric without a better one; default: never."""

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str) -> str:
        if metric not in VALID_METRICS and "/" not in metric:
            raise TextmillError(
                f"train.best.metric: found '{metric}'; give {', '.join(VALID_METRICS)}, or TASK/METRIC of train.tasks, "
                "such as lambada/accuracy"
            )
        return metric

    @property
    def highest(self) -> bool:
        """Whether the highest value is the best."""
        name = self.metric.rpartition("/")[2]
        return not any(word in name for word in ("loss", "perplexity", "bits", "error"))


class CheckpointsConfig(Section):
    """Which checkpoints are kept."""

    keep: int = changeable(2, ge=1)
    """How many of the newest checkpoints are kept; the best one and those of `train.checkpoints.keep_every` are kept
    too."""
    keep_every: int | None = changeable(None, ge=1)
    """Keep for good every checkpoint whose step is a multiple of this; default: none."""


TERMS = ("kl", "mse", "cosine", "hidden")
"""The terms of the loss that need a teacher."""


class DistilConfig(Section):
    """Distillation: the loss compares the model with teachers, frozen models with the same tokenizer."""

    teachers: list[str] = models([])
    """The teachers: runs, checkpoints, Hugging Face model folders or hub names; the target is the mean of their
    distributions. Default: no distillation."""
    temperature: float = Field(2.0, gt=0)
    """Logits of model and teachers are divided by this in `train.distil.kl`, which is multiplied by its square."""
    kl: float = Field(0.5, ge=0)
    """Weight of the divergence between the teachers' and the model's predictions (alpha_ce in other tools)."""
    labels: float = Field(0.5, ge=0)
    """Weight of the usual loss, the cross-entropy of the labels (alpha_clm or alpha_mlm in other tools)."""
    mse: float = Field(0.0, ge=0)
    """Weight of the squared difference of the logits, summed over the vocabulary; with several teachers, to their mean
    logits."""
    cosine: float = Field(0.0, ge=0)
    """Weight of 1 - cosine between the last hidden states; needs teachers of the model's width."""
    hidden: float = Field(0.0, ge=0)
    """Weight of the mean squared difference between hidden states after the model's blocks and those of
    `train.distil.teacher_layers`; needs teachers of the model's width."""
    teacher_layers: list[int] = []
    """For `train.distil.hidden`: the teachers' block, counted from 0, for each of the model's first blocks; default:
    for all of them, evenly spaced, the last to the last."""

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms with a weight above 0, if there are teachers."""
        return tuple(name for name in TERMS if getattr(self, name)) if self.teachers else ()

    @model_validator(mode="after")
    def _check_terms(self) -> DistilConfig:
        if self.teachers and not any(getattr(self, name) for name in TERMS):
            raise TextmillError(
                "train.distil.teachers: no term uses them; set train.distil.kl, mse, cosine or hidden above 0"
            )
        changed = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        if changed and not self.teachers:
            raise TextmillError(f"train.distil.{changed[0]}: there are no teachers; set train.distil.teachers")
        if self.teacher_layers and not self.hidden:
            raise TextmillError("train.distil.teacher_layers: only train.distil.hidden uses layers; set it above 0")
        return self


OPTIMIZER_FILES = (Path(__file__).parents[1] / "engines/optimizers").glob("*_torch.py")
OPTIMIZERS = ("adamw", *sorted(path.name.removesuffix("_torch.py") for path in OPTIMIZER_FILES))
"""AdamW, and the files NAME_torch.py of engines/optimizers."""
if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Literal[OPTIMIZERS] | str
LOSSES = ("token_mean", "sample_mean")
SCHEDULES = ("cosine", "linear", "constant", "stable", "inverse_sqrt", "range_test")

TrainPresetName = Literal["none", "auto", "pretrain-nano", "pretrain-muon", "pretrain-adamw"]
_PRETRAIN: dict[str, Any] = {
    "schedule": "cosine",
    "warmup": 0.05,
    "betas": [0.9, 0.95],
    "weight_decay": 0.1,
    "clip": 1.0,
}
TRAIN_PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    # Learning rates, weight decay, batch and warm-up follow when net, tokens and length are known.
    "auto": {"optimizer": "muon", "schedule": "cosine", "muon": {"momentum": 0.9}, "betas": [0.9, 0.95], "clip": 1.0},
    # The best of the settings tried on the nano size and a megabyte of text in samples of 64, on a CPU.
    "pretrain-nano": {
        **_PRETRAIN,
        "optimizer": "muon",
        "learning_rate": 1e-2,
        "min_learning_rate": 6e-4,
        "muon": {"momentum": 0.9},
        "betas": [0.9, 0.99],
        "batch": 16,
    },
    # The best of the settings tried on 124M parameters and 52M tokens in samples of 1,024, all in
    # bench/LOG.md.
    "pretrain-muon": {
        **_PRETRAIN,
        "optimizer": "muon",
        "learning_rate": 4.5e-3,
        "muon": {"momentum": 0.9, "adamw_rate_factor": 2.2},
        "batch": 32,
    },
    "pretrain-adamw": {**_PRETRAIN, "optimizer": "adamw", "learning_rate": 6e-4, "batch": 64},
}

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
    """Minutes of the entire command: steps are timed, and their number corrected during the run; a resume keeps it."""
    max_epochs: float | None = changeable(None, gt=0)
    """The run ends after so many epochs at most: with `train.minutes`, even if there is time for more."""
    learning_rate: float = Field(6e-4, gt=0)
    """Highest learning rate."""
    min_learning_rate: float = Field(0.0, ge=0)
    """Learning rate at the end of the schedule: that of the step after the last one, as in other tools, so that the
    last step still trains."""
    warmup: int | float = Field(0.05, ge=0)
    """Warm-up steps, or a fraction of the run when below 1 (with `train.minutes`: of the estimated steps)."""
    warmup_shape: Literal["linear", "log"] = "linear"
    """How the learning rate rises: linear in the step, or in its logarithm from `train.min_learning_rate`, as
    DeepSpeed's WarmupLR."""
    schedule: Literal["cosine", "linear", "constant", "stable", "inverse_sqrt", "range_test"] | str = source(
        "cosine", suffix=".py"
    )
    """How the learning rate falls after the warm-up. stable: only in the last `train.decay_fraction` of the run
    (warmup-stable-decay); inverse_sqrt: by one over the root of the step; range_test: it rises from
    `train.min_learning_rate` until training diverges, to find the highest usable rate; or a Python file with your own,
    as in `train.optimizer`."""
    decay_steps: int | None = changeable(None, ge=1)
    """The number of steps after which the learning rate has reached its minimum; default: all."""
    decay_samples: int | None = changeable(None, ge=1)
    """Samples after which the learning rate reaches its minimum, instead of `train.decay_steps`; the decay then follows
    the samples, which `train.batch_rampup` makes slower at first, as Megatron's lr-decay-samples."""
    decay_fraction: float = changeable(0.2, gt=0, le=1)
    """stable: the last fraction of all steps, in which the learning rate falls."""
    range_test_steps: int = Field(2000, ge=1)
    """range_test: steps in which the learning rate rises by `train.min_learning_rate` (the step size of DeepSpeed's
    LRRangeTest)."""
    optimizer: OptimizerName = source("adamw", suffix=".py")
    """adamw, muon or a Python file. adamw: Adam with decoupled weight decay; muon: orthogonalised momentum on the
    blocks' matrices, AdamW on the rest; or a Python file with your own, such as ./lion.py (docs/own-parts.md). The file
    is executed, so only your own YAML or the command line may name it."""
    muon: MuonConfig = MuonConfig()
    """Settings of `train.optimizer=muon`."""
    betas: list[float] = Field([0.9, 0.95], min_length=2, max_length=2)
    """Adam's decay rates of the first and second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Adam's epsilon, added to the denominator."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay of matrices and embeddings."""
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
    ema_window: float | None = Field(None, gt=0)
    """Evaluate and save an exponential moving average (EMA) of the weights instead of the weights themselves, over
    about this many epochs, such as 0.15; from 10 on: over this many steps, a decay of 1 - 1 / steps. Default: no
    average. Training continues with the weights themselves."""
    distil: DistilConfig = DistilConfig()
    """Distillation from teacher models."""
    generations: int = Field(1, ge=1)
    """Train the model so many times, each time from other random weights and taught by the one before; they share
    `train.minutes`. The last one is the result; the others are in `generation-1` and so on, in the run folder."""
    loss: Literal["token_mean", "sample_mean"] | str = source("token_mean", suffix=".py")
    """token_mean: mean over all loss tokens of the step; sample_mean: mean of each sample's mean; or a Python file with
    your own, as in `train.optimizer`."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """The fraction of each label that is spread over the whole vocabulary; in the training loss only."""
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
    evaluate_batch: int | None = changeable(None, ge=1)
    """Samples of such a batch; default: `train.batch`."""
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
    def warmup_steps(self) -> int:
        """Warm-up in steps; `warmup` below 1 is a fraction of the run."""
        return round(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    @property
    def decay_end(self) -> float:
        """The step at which the decay ends, in steps of `batch` samples."""
        if self.decay_steps:
            return self.decay_steps
        return self.decay_samples / self.batch if self.decay_samples else self.steps

    @property
    def tasks_interval(self) -> int | Literal["epoch"]:
        """Steps between two measurements of `train.tasks`, or epoch."""
        return self.tasks_every or self.evaluate_every

    def ema_steps(self, epoch_steps: float) -> float | None:
        """`train.ema_window` in steps, of which an epoch has `epoch_steps`."""
        in_epochs = self.ema_window is not None and self.ema_window < EMA_STEPS_FROM
        return self.ema_window * epoch_steps if in_epochs and self.ema_window else self.ema_window

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
    def _check_range_test_start(self) -> TrainConfig:
        if self.schedule == "range_test" and not self.min_learning_rate:
            raise TextmillError(
                "train.min_learning_rate: train.schedule=range_test starts from it; set it above 0, such as 1e-6"
            )
        return self

    @field_validator("optimizer", "loss", "schedule")
    @classmethod
    def _check_own_file(cls, value: str, info: ValidationInfo) -> str:
        names = {"optimizer": OPTIMIZERS, "loss": LOSSES, "schedule": SCHEDULES}[str(info.field_name)]
        if value not in names and not is_own_file(value):
            raise TextmillError(
                f"train.{info.field_name}: found '{value}'; give one of {', '.join(names)}, or your own file: ./mine.py"
            )
        return value

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
