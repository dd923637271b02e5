"""The teachers of `train.distil` before the first step: whether they fit the run, what they cost, what they are."""

from __future__ import annotations

from textmill.checkpoints.adapters import tokenizer_folder
from textmill.checkpoints.folders import open_model
from textmill.config import EngineConfig, JaxEngine, RunConfig, TorchEngine
from textmill.engines.distillation.folders import teacher_folder
from textmill.errors import TextmillError
from textmill.models import open_family, read_shape
from textmill.storage.tensor_files import fingerprint_weights
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

PREDICTED = {"next_token": "the next token", "masked": "masked tokens"}
"""What the families of an objective predict, in words."""


def check_teachers(config: RunConfig, tokenizer: TextTokenizer | None = None) -> None:
    """Refuse engines that cannot distil, teachers that do not exist, and those with another tokenizer."""
    names = config.train.distil.teachers
    if not names:
        return
    engine = config.engine
    if config.train.distil.hidden:
        _check_hidden(engine)
    family = config.model.family
    if config.model.init_from:
        family = read_shape(open_model(config.model.init_from).folder).family
    objective = open_family(family).OBJECTIVE
    for name in names:
        folder = teacher_folder(name)
        teacher = read_shape(folder)
        teacher_objective = open_family(teacher.family).OBJECTIVE
        if teacher_objective != objective:
            raise TextmillError(
                f"train.distil.teachers: {name} is a {teacher.family}, which predicts "
                f"{PREDICTED.get(teacher_objective, teacher_objective)}, and the model "
                f"{PREDICTED.get(objective, objective)}; name a teacher of the same kind"
            )
        tokenizer_of_teacher = tokenizer_folder(folder)
        if tokenizer is not None and open_tokenizer(tokenizer_of_teacher).fingerprint != tokenizer.fingerprint:
            raise TextmillError(
                f"train.distil.teachers: {name} has another tokenizer than this run, so that its predictions mean "
                f"other tokens; tokenize with the teacher's: tokenizer.use={tokenizer_of_teacher}"
            )


def _check_hidden(engine: EngineConfig) -> None:
    """Refuse engines that cannot compare the hidden states of blocks."""
    conflict = ""
    if isinstance(engine, JaxEngine):
        conflict = "engine.kind=jax; set it to 0, or engine.kind=torch"
    elif isinstance(engine, TorchEngine) and engine.mesh.tensor > 1:
        conflict = (
            f"engine.mesh.tensor={engine.mesh.tensor}, whose processes divide these states; set one of them to 0 or 1"
        )
    elif engine.recompute:
        conflict = f"engine.recompute={engine.recompute}; set one of them to 0"
    if conflict:
        raise TextmillError(f"train.distil.hidden: does not work with {conflict}")


def fingerprint_teachers(config: RunConfig) -> list[str]:
    """A fingerprint of each teacher's weights."""
    return [fingerprint_weights(teacher_folder(name)) for name in config.train.distil.teachers]


def teacher_flops(config: RunConfig, length: int) -> float:
    """FLOPs of the teachers for one token: a forward pass, which is a third of a step; 0 if they are cached."""
    if config.train.distil.cache:
        return 0.0
    shapes = (read_shape(teacher_folder(name)) for name in config.train.distil.teachers)
    return sum(shape.flops_per_token(length) / 3 for shape in shapes)
