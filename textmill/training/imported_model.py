"""`model.init_from` in another tool's format: imported into the run's folder before training starts."""

from __future__ import annotations

from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.checkpoints.folders import list_checkpoints
from textmill.config import RunConfig

IMPORTED = "imported"
"""The folder, inside that of the run, of the imported model."""


def use_imported_model(config: RunConfig, *, write: bool = True) -> RunConfig:
    """The config with `model.init_from` as a model folder; only the rank that may `write` imports the file."""
    given = config.model.init_from
    if given is None or not _may_be_foreign(Path(given)):
        return config
    from textmill.conversion.importing import import_model, is_importable  # they import torch, which JAX does not need

    if not is_importable(Path(given)):
        return config  # opening it says what is wrong
    folder = config.folder_of("train") / IMPORTED
    if write:
        tokenizer = config.tokenizer.use if config.tokenizer.use and Path(config.tokenizer.use).exists() else None
        import_model(given, str(folder), tokenizer=tokenizer)
    return config.model_copy(update={"model": config.model.model_copy(update={"init_from": str(folder)})})


def _may_be_foreign(path: Path) -> bool:
    """A file, or a folder without safetensors that is not a run."""
    if not path.is_dir():
        return path.is_file()
    runs = map(list_checkpoints, (path, path / "run"))
    return not is_adapter(path) and not any(path.glob("*.safetensors")) and not any(runs)
