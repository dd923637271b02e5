"""The teachers of `train.distil` without a framework: their folders, whether they fit the run, and what they cost."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.adapters import is_adapter, tokenizer_folder
from textmill.checkpoints.folders import open_model
from textmill.config import DistilConfig, EngineConfig, ModelConfig, TorchEngine, TrainConfig
from textmill.errors import TextmillError
from textmill.models import Shape, open_family, read_shape
from textmill.storage.tensor_files import fingerprint_weights
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

KEY = "train.distil.teachers"
CHUNK_LOGITS = 1 << 26
"""Logits of a chunk of the loss on a GPU; several matrices of this size exist in fp32."""
COMPILED_CHUNKS = 4
"""How much larger chunks are if the loss is compiled: most of these matrices then do not exist."""
MATRICES = 8
PER_TEACHER = 3
"""Matrices of that size that may exist at once, and more for each teacher: an upper bound from the formulas."""
TEACHER_FACTOR = 2.0
"""The time of a step with a teacher of the same size, relative to one without, at most: 1.27 and 1.5 were measured on a
CPU, with nets of 10.8M and 0.5M parameters."""
PREDICTED = {"next_token": "the next token", "masked": "masked tokens"}
"""What the families of an objective predict, in words."""


def check_teachers(
    distil: DistilConfig, engine: EngineConfig, model: ModelConfig, tokenizer: TextTokenizer | None = None
) -> None:
    """Refuse engines that cannot distil, teachers that do not exist, and those with another tokenizer."""
    if not distil.teachers:
        return
    if distil.hidden:
        _check_hidden(engine)
    family = model.family
    if model.init_from:
        family = read_shape(open_model(model.init_from).folder).family
    objective = open_family(family).OBJECTIVE
    for name in distil.teachers:
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
    if isinstance(engine, TorchEngine) and engine.mesh.tensor > 1:
        conflict = (
            f"engine.mesh.tensor={engine.mesh.tensor}, whose processes divide these states; set one of them to 0 or 1"
        )
    elif engine.activation_checkpointing:
        conflict = f"engine.activation_checkpointing={engine.activation_checkpointing}; set one of them to 0"
    if conflict:
        raise TextmillError(f"train.distil.hidden: does not work with {conflict}")


def resolve_teachers(train: TrainConfig) -> TrainConfig:
    """The settings with the folder of each teacher in place of its name; the checksums of a checkpoint are compared."""
    folders = [str(open_model(name, KEY).folder) for name in train.distil.teachers]
    return train.model_copy(update={"distil": train.distil.model_copy(update={"teachers": folders})})


def teacher_folder(name: str) -> Path:
    """A teacher's folder: the name itself if it is one, as after `resolve_teachers`, since opening hashes all files."""
    folder = Path(name)
    return folder if (folder / "config.json").is_file() or is_adapter(folder) else open_model(name, KEY).folder


def fingerprint_teachers(names: list[str]) -> list[str]:
    """A fingerprint of each teacher's weights."""
    return [fingerprint_weights(teacher_folder(name)) for name in names]


def teacher_flops(distil: DistilConfig, length: int) -> float:
    """FLOPs of the teachers for one token: a forward pass, which is a third of a step."""
    shapes = (read_shape(teacher_folder(name)) for name in distil.teachers)
    return sum(shape.flops_per_token(length) / 3 for shape in shapes)


def generations_cost(count: int) -> float:
    """The time of all generations of `train.generations`, relative to that of the first."""
    return 1 + TEACHER_FACTOR * (count - 1)


def teacher_bytes(train: TrainConfig, *, on_gpu: bool) -> int:
    """Bytes of the teachers' weights, and of the chunk of the loss on a GPU; 0 without teachers."""
    names = train.distil.teachers
    weights = sum(4 * read_shape(teacher_folder(name)).parameters for name in names)
    uses_chunks = on_gpu and bool(names)
    return weights + (4 * CHUNK_LOGITS * (MATRICES + PER_TEACHER * len(names)) if uses_chunks else 0)


def chunk_tokens(vocab: int, *, compiled: bool) -> int:
    """Tokens of a chunk of the loss on a GPU: a power of two, which divides most micro-batches evenly."""
    most = max(1, CHUNK_LOGITS * (COMPILED_CHUNKS if compiled else 1) // vocab)
    return 1 << (most.bit_length() - 1)


def check_teacher(name: str, teacher: Shape, student: Shape, train: TrainConfig) -> None:
    """Refuse a teacher that cannot teach this model."""
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


def matched_layers(distil: DistilConfig, student: int, teacher: int) -> tuple[list[int], list[int]]:
    """The blocks of the student and of a teacher that `train.distil.hidden` compares; `student` and `teacher` are their
    numbers of blocks. By default a student of 3 blocks and a teacher of 6: [0, 1, 2] and [1, 3, 5]."""
    if not distil.hidden:
        return [], []
    teacher_layers = distil.teacher_layers
    if not teacher_layers:
        teacher_layers = [max(0, round((layer + 1) * teacher / student) - 1) for layer in range(student)]
    key = "train.distil.teacher_layers"
    if len(teacher_layers) > student:
        raise TextmillError(f"{key}: names {len(teacher_layers)} blocks, the model has {student}; name fewer")
    if wrong := [layer for layer in teacher_layers if not 0 <= layer < teacher]:
        raise TextmillError(f"{key}: there is no block {wrong[0]}; give numbers from 0 to {teacher - 1}")
    return list(range(len(teacher_layers))), teacher_layers
