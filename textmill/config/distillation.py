"""The sub-section `train.distil`: training with teachers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from textmill.config.section import Section, models, path
from textmill.errors import TextmillError

TERMS = ("kl", "mse", "cosine", "hidden")
"""The terms of the loss that need a teacher."""

TEACHER_CACHE = "teacher-cache"
"""Where `textmill cache-teacher` writes unless `train.distil.cache` is set: a folder next to the tokens."""


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
    """Weight of the mean squared difference between hidden states after `train.distil.student_layers` and
    `train.distil.teacher_layers`; needs teachers of the model's width."""
    student_layers: list[int] = []
    """Blocks of the model, counted from 0, for `train.distil.hidden`; default: all."""
    teacher_layers: list[int] = []
    """The teachers' block for each of `train.distil.student_layers`; default: evenly spaced, the last to the last."""
    divergence: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """forward: KL from the teachers to the model, which covers all that they predict; reverse: from the model to them,
    which prefers what they find likely; jensen_shannon: the mean of both KLs to their mixture."""

    top_k: int = Field(0, ge=0)
    """`train.distil.kl` compares only so many tokens, those that the teachers find most likely, and all others together
    as one; 0: every token of the vocabulary."""
    cache: str | None = path()
    """Folder with the teachers' predictions, which `textmill cache-teacher` writes; training then has no teacher in
    memory. Needs `train.distil.top_k`; `train.distil.kl` is the only term."""

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
        if self.cache is not None:
            self._check_cache()
        if self.top_k and self.teachers and not self.kl:
            raise TextmillError("train.distil.top_k: only train.distil.kl compares distributions; set it above 0")
        if (self.student_layers or self.teacher_layers) and not self.hidden:
            raise TextmillError("train.distil.student_layers: only train.distil.hidden uses layers; set it above 0")
        if self.teacher_layers and len(self.teacher_layers) != len(self.student_layers):
            raise TextmillError(
                f"train.distil.teacher_layers: has {len(self.teacher_layers)} blocks, train.distil.student_layers "
                f"{len(self.student_layers)}; give as many of both"
            )
        return self

    def check_samples(self, layout: str, minutes: float | None) -> None:
        """Refuse a run whose samples, or their number, are not known before it: predictions cannot be cached."""
        if layout == "masked":
            raise TextmillError(
                "train.distil.cache: does not work with train.layout=masked, where few positions have predictions; "
                "train with the teachers themselves"
            )
        if minutes is not None:
            raise TextmillError(
                "train.minutes: how many samples the run will see is not known before, so predictions of teachers "
                "cannot be cached; set train.steps or train.epochs"
            )

    def _check_cache(self) -> None:
        if not self.top_k:
            raise TextmillError(
                "train.distil.cache: has only the most likely tokens; set train.distil.top_k to how many, such as 64"
            )
        if others := [name for name in TERMS if name != "kl" and getattr(self, name)]:
            raise TextmillError(
                f"train.distil.{others[0]}: needs the teachers themselves, and train.distil.cache has only their most "
                f"likely tokens; set train.distil.{others[0]}=0, or remove train.distil.cache"
            )
