"""The model folders of the teachers."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import open_model
from textmill.config import RunConfig

KEY = "train.distil.teachers"


def resolve_teachers(config: RunConfig) -> RunConfig:
    """The config with the folder of each teacher in place of its name; the checksums of a checkpoint are compared."""
    distil = config.train.distil
    if not distil.teachers:
        return config
    folders = [str(open_model(name, KEY).folder) for name in distil.teachers]
    train = config.train.model_copy(update={"distil": distil.model_copy(update={"teachers": folders})})
    return config.model_copy(update={"train": train})


def teacher_folder(name: str) -> Path:
    """A teacher's folder: the name itself if it is one, as after `resolve_teachers`, since opening hashes all files."""
    folder = Path(name)
    return folder if (folder / "config.json").is_file() or is_adapter(folder) else open_model(name, KEY).folder
