"""Small teachers for `textmill verify`: nets like the small copy itself, with other random weights."""

from __future__ import annotations

import json
from pathlib import Path

from textmill.config import DistilConfig, RunConfig
from textmill.models import Shape, initial_weights, open_family
from textmill.storage.files import write_bytes, write_text
from textmill.storage.tensor_files import encode_safetensors

MOST_TEACHERS = 2
MOST_TOKENS = 10
"""Most teachers of a small copy, and most tokens of `train.distil.top_k` there."""


def shrink_distil(distil: DistilConfig) -> DistilConfig:
    """The same terms for a small copy; instead of cached predictions, it has teachers with the same `top_k`."""
    if not distil.teachers:
        return distil
    update = {
        "teachers": [f"teacher-{number}" for number in range(min(MOST_TEACHERS, len(distil.teachers)))],
        "top_k": min(MOST_TOKENS, distil.top_k),
        "cache": None,
        "student_layers": [],
        "teacher_layers": [],
    }
    return distil.model_copy(update=update)


def write_teachers(config: RunConfig, shape: Shape, folder: Path) -> RunConfig:
    """Write the teachers of a small copy of this shape; return the config with their folders."""
    family = open_family(config.model.family)
    folders = []
    for number, name in enumerate(config.train.distil.teachers):
        teacher = folder / name
        teacher.mkdir()
        write_text(teacher / "config.json", json.dumps(family.hf_config_of(shape)))
        weights = [*initial_weights(shape, config.train.seed + 1 + number)]
        write_bytes(teacher / "model.safetensors", encode_safetensors(weights))
        folders.append(str(teacher.absolute()))
    distil = config.train.distil.model_copy(update={"teachers": folders})
    return config.model_copy(update={"train": config.train.model_copy(update={"distil": distil})})
