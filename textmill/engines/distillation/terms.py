"""The settings of distillation as engines read them, and whether a teacher fits the model; without a framework."""

from __future__ import annotations

from typing import NamedTuple

from textmill.config import DistilConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.models import Shape


class Terms(NamedTuple):
    """The settings of a loss, as plain values, which compilers can read."""

    labels: float
    kl: float
    mse: float
    temperature: float
    divergence: str
    smoothing: float
    z: float
    top_k: int


def terms_of(train: TrainConfig) -> Terms:
    """The settings of the terms that compare logits."""
    distil = train.distil
    return Terms(
        labels=distil.labels,
        kl=distil.kl,
        mse=distil.mse,
        temperature=distil.temperature,
        divergence=distil.divergence,
        smoothing=train.label_smoothing,
        z=train.z_loss,
        top_k=distil.top_k,
    )


def check_top_k(distil: DistilConfig, shape: Shape) -> None:
    """Refuse to keep as many tokens as there are."""
    if distil.top_k >= shape.vocab:
        raise TextmillError(
            f"train.distil.top_k: {distil.top_k:,} are not fewer than the vocabulary's {shape.vocab:,} tokens; set a "
            "lower number, or 0 to compare all"
        )


def matched_layers(distil: DistilConfig, student: int, teacher: int) -> tuple[list[int], list[int]]:
    """The blocks of the student and of a teacher that `train.distil.hidden` compares; `student` and `teacher` are their
    numbers of blocks. By default a student of 3 blocks and a teacher of 6: [0, 1, 2] and [1, 3, 5]."""
    if not distil.hidden:
        return [], []
    student_layers = distil.student_layers or list(range(student))
    teacher_layers = distil.teacher_layers
    if not teacher_layers:
        teacher_layers = [max(0, round((layer + 1) * teacher / student) - 1) for layer in student_layers]
    for key, layers, count in (
        ("student_layers", student_layers, student),
        ("teacher_layers", teacher_layers, teacher),
    ):
        if wrong := [layer for layer in layers if not 0 <= layer < count]:
            raise TextmillError(f"train.distil.{key}: there is no block {wrong[0]}; give numbers from 0 to {count - 1}")
    return student_layers, teacher_layers


def check_logits(shape: Shape) -> None:
    """Refuse a net whose logits are capped: they are compared as the head gives them."""
    if getattr(shape, "logit_softcap", 0):
        raise TextmillError("train.distil: a model with model.shape.logit_softcap cannot be a teacher or be taught")


def check_teacher(name: str, teacher: Shape, student: Shape, train: TrainConfig) -> None:
    """Refuse a teacher that cannot teach this model."""
    check_logits(teacher)
    where = f"train.distil.teachers: {name}"
    length = train.length or student.positions
    if teacher.vocab < student.vocab:  # rows that it has beyond these are padding
        raise TextmillError(
            f"{where}: predicts {teacher.vocab:,} tokens, the model {student.vocab:,}; both need the same tokenizer"
        )
    if teacher.positions < length:
        raise TextmillError(
            f"{where}: has {teacher.positions:,} positions, samples have {length:,} tokens; lower train.length"
        )
    needs = [term for term in ("cosine", "hidden") if getattr(train.distil, term)]
    if needs and teacher.width != student.width:
        raise TextmillError(
            f"{where}: has width {teacher.width}, the model {student.width}, and train.distil.{needs[0]} compares "
            f"hidden states; set train.distil.{needs[0]}=0"
        )
