"""Sub-sections of `train`: settings of one batch layout, one optimizer or one schedule, and of checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from textmill.config.section import Section, changeable, source
from textmill.errors import TextmillError

MEMORY_STEPS_FROM = 10
"""A `train.average.memory` from this on is in steps, not in epochs."""


class PackedConfig(Section):
    """Settings of `train.layout=packed`."""

    isolate_documents: bool = False
    """Attention and positions start again at each document, and no document predicts the next one's first token."""
    last_window: Literal["keep", "drop"] = "keep"
    """The tokens after the last full window of an epoch: keep (filled up from the start of the epoch) or drop."""


class PaddedConfig(Section):
    """Settings of `train.layout=padded`."""

    long_documents: Literal["split", "truncate"] = "split"
    """A document longer than `train.length`: split into several samples, or truncate to its beginning."""
    end_truncated: bool = False
    """End a truncated sample with the end-of-text token, as dsGPT2 does."""

    @model_validator(mode="after")
    def _check_end_truncated(self) -> PaddedConfig:
        if self.end_truncated and self.long_documents != "truncate":
            raise TextmillError(
                "train.padded.end_truncated: train.padded.long_documents=split truncates no document; "
                "set train.padded.long_documents=truncate"
            )
        return self


class ChatConfig(Section):
    """Settings of `train.layout=chat`."""

    pack: bool = True
    """Put several short conversations into one sample; false: one conversation per sample, as dsGPT2 does."""
    truncate: Literal["start", "end"] = "start"
    """Which end of a conversation longer than `train.length` is dropped; start keeps the last answer and its end."""


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
    max_ngram: int = Field(1, ge=1, le=16)
    """Mask up to this many words in a row, n words with a probability in proportion to 1/n; Megatron uses 3."""
    short_probability: float = Field(0.1, ge=0, le=1)
    """Pairs: the fraction of samples that are cut to a random shorter length."""
    pack: bool = True
    """Put several short samples into one row, isolated from each other, so that little padding is left."""
    counts: str | None = source()
    """Mask rare tokens more often: a file of token counts, written by `textmill show WHERE --counts FILE`; default:
    all tokens are equally likely."""
    counts_power: float = Field(0.7, gt=0, le=1)
    """With `train.masked.counts`: a token seen n times has the weight n to the power of minus this."""


class MuonConfig(Section):
    """Settings of `train.optimizer=muon`."""

    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the running mean of the gradients."""
    adamw_rate_factor: float = Field(1.0, gt=0)
    """Learning rate of the weights that AdamW updates (embeddings, biases, LayerNorms), as a multiple of
    `train.learning_rate`."""


class MultiTokenConfig(Section):
    """Multi-token prediction without another head: the same logits also predict the token after the next."""

    weight: float = Field(0.0, ge=0)
    """Weight of the loss of the token after the next at the start of the run, such as 0.5; it falls linearly to 0. The
    logged loss is that of the next token alone. Default: no such loss."""
    until: float = Field(0.5, gt=0, le=1)
    """The fraction of the run after which the weight is 0."""


class StableConfig(Section):
    """Settings of `train.schedule=stable` (warmup-stable-decay)."""

    decay_fraction: float = changeable(0.2, gt=0, le=1)
    """The last fraction of the run, in which the learning rate falls."""


class RangeTestConfig(Section):
    """Settings of `train.schedule=range_test` (DeepSpeed's LRRangeTest)."""

    steps: int = Field(2000, ge=1)
    """Steps in which the learning rate rises by `train.range_test.rate` times `train.min_learning_rate`."""
    rate: float = Field(1.0, gt=0)
    """How fast the learning rate rises."""
    staircase: bool = False
    """Rise once every `train.range_test.steps` steps instead of continuously."""


class SpikesConfig(Section):
    """Skip the optimizer step when the loss spikes."""

    threshold: float | None = changeable(None, gt=0)
    """Skip the update of a step whose loss is this many robust deviations above the median of the last
    `train.spikes.window` losses, such as 6; default: skip none."""
    window: int = changeable(128, ge=2)
    """How many past losses give the median; no update is skipped before there are this many."""


class AverageConfig(Section):
    """An average of the weights of the last steps, which is evaluated and saved as the model."""

    memory: float | None = Field(None, gt=0)
    """Evaluate and save an exponential moving average of the weights instead of the weights themselves, with a memory
    of this many epochs, such as 0.15; from 10 on: of this many steps; default: no average. Training continues with the
    weights themselves."""

    def memory_in_steps(self, epoch_steps: float) -> float | None:
        """The memory in steps, of which an epoch has `epoch_steps`."""
        in_epochs = self.memory is not None and self.memory < MEMORY_STEPS_FROM
        return self.memory * epoch_steps if in_epochs and self.memory else self.memory


VALID_METRICS = ("valid_loss", "valid_accuracy", "valid_bits_per_byte", "valid_pair_loss", "valid_pair_accuracy")
"""What is measured on the valid split; the last two with labels of sentence pairs."""


class BestConfig(Section):
    """Which checkpoint is the best one, and when a run ends early because there is no better one."""

    metric: str = changeable("valid_loss")
    """The metric of metrics.jsonl that chooses the best checkpoint: valid_loss, valid_accuracy ..., or one of
    `train.tasks`, such as lambada/accuracy."""
    direction: Literal["auto", "lowest", "highest"] = changeable("auto")
    """Which value is the best one. auto: the highest of an accuracy (acc...), else the lowest."""
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
        is_accuracy = name.startswith("acc") or name.endswith("accuracy")
        return is_accuracy if self.direction == "auto" else self.direction == "highest"


class CheckpointsConfig(Section):
    """Which checkpoints are kept, and how large their files are."""

    keep: int = changeable(2, ge=1)
    """How many of the newest checkpoints are kept; the best one and those of `train.checkpoints.keep_every` are kept
    too."""
    keep_every: int | None = changeable(None, ge=1)
    """Keep for good every checkpoint whose step is a multiple of this; default: none."""
    max_file_gb: float = changeable(5.0, gt=0)
    """Largest file of a checkpoint in GB; larger state is written as several files, which transformers also opens."""
