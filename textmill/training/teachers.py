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


def check_teachers(config: RunConfig, tokenizer: TextTokenizer | None = None) -> None:
    """Refuse engines that cannot distil, teachers that do not exist, and those with another tokenizer."""
    names = config.train.distil.teachers
    if not names:
        return
    engine = config.engine
    if config.train.distil.hidden:
        _check_hidden(engine)
    given = read_shape(open_model(config.model.init_from).folder) if config.model.init_from else None
    own = open_family(given.family if given else config.model.family).OBJECTIVE
    for name in names:
        found = teacher_folder(name)
        teacher, folder = read_shape(found), tokenizer_folder(found)
        if (theirs := open_family(teacher.family).OBJECTIVE) != own:
            raise TextmillError(
                f"train.distil.teachers: {name} is a {teacher.family}, which predicts {theirs}, and the model {own}; "
                "name a teacher of the same kind"
            )
        if tokenizer is not None and open_tokenizer(folder).fingerprint != tokenizer.fingerprint:
            raise TextmillError(
                f"train.distil.teachers: {name} has another tokenizer than this run, so that its predictions mean "
                f"other tokens; tokenize with the teacher's: tokenizer.use={folder}"
            )


def _check_hidden(engine: EngineConfig) -> None:
    """Refuse engines that cannot compare the hidden states of blocks."""
    found = ""
    if isinstance(engine, JaxEngine):
        found = "engine.kind=jax; set it to 0, or engine.kind=torch"
    elif isinstance(engine, TorchEngine) and engine.mesh.tensor > 1:
        found = (
            f"engine.mesh.tensor={engine.mesh.tensor}, whose processes divide these states; set one of them to 0 or 1"
        )
    elif engine.recompute:
        found = f"engine.recompute={engine.recompute}; set one of them to 0"
    if found:
        raise TextmillError(f"train.distil.hidden: does not work with {found}")


def fingerprint_teachers(config: RunConfig) -> list[str]:
    """A fingerprint of each teacher's weights."""
    return [fingerprint_weights(teacher_folder(name)) for name in config.train.distil.teachers]


def teacher_flops(config: RunConfig, length: int) -> float:
    """FLOPs of the teachers for one token: a forward pass, which is a third of a step; 0 if they are cached."""
    if config.train.distil.cache:
        return 0.0
    shapes = (read_shape(teacher_folder(name)) for name in config.train.distil.teachers)
    return sum(shape.flops_per_token(length) / 3 for shape in shapes)
