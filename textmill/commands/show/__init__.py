"""The verb show: what is in a folder, as a person would look at it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textmill.commands.show.corpus import show_corpus
from textmill.commands.show.steps import show_step
from textmill.commands.show.tokens import show_tokens
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.where import open_where

VIEWS: dict[str, tuple[str, Callable[[RunConfig], None]]] = {
    "prepare": ("corpus", show_corpus),
    "tokenize": ("tokens", show_tokens),
}
"""What shows the folder of a stage, by the verb that makes it."""


def show(where: str, settings: list[str] | None = None, step: int | None = None) -> None:
    """Print what stands at WHERE: a corpus, token stores, both of a project, or the documents that a step of a run saw."""
    config = open_where(where, settings or []).config
    if step is not None:
        show_step(config, step)
        return
    root = Path(where)
    verb = open_manifest(root)["verb"] if (root / MANIFEST).is_file() else None
    made = [name for name, (stage, _) in VIEWS.items() if (config.folder_of(stage) / MANIFEST).is_file()]  # type: ignore[arg-type]
    chosen = [verb] if verb in VIEWS else made
    if not chosen:
        raise TextmillError(f"{where}: nothing to show there yet; make a corpus first: textmill prepare {where}")
    for number, name in enumerate(chosen):
        print("\n" if number else "", end="")
        VIEWS[str(name)][1](config)
