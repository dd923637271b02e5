"""The command show: prints what is in a folder, for people to read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from textmill.commands.show.corpus import show_corpus
from textmill.commands.show.dropped import show_dropped
from textmill.commands.show.run import show_run
from textmill.commands.show.steps import show_step
from textmill.commands.show.tokens import show_tokens
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.track.jsonl import METRICS_FILE
from textmill.where import open_where

VIEWS: dict[str, tuple[str, Callable[[RunConfig], None]]] = {
    "prepare": ("corpus", show_corpus),
    "tokenize": ("tokens", show_tokens),
}
"""What shows the folder of a stage, by the command that writes it."""


def show(where: str, settings: list[str] | None = None, step: int | None = None, dropped: str | None = None) -> None:
    """Print the corpus, the token stores or the learning curve at WHERE, all of them for a project, the documents that
    a training step saw, or those that a rule dropped."""
    config = open_where(where, settings or []).config
    if dropped is not None:
        show_dropped(config, dropped)
        return
    if step is not None:
        show_step(config, step)
        return
    root = Path(where)
    command = open_manifest(root)["verb"] if (root / MANIFEST).is_file() else None
    folders = {name: config.folder_of(stage) for name, (stage, _) in VIEWS.items()}  # type: ignore[arg-type]
    written = [name for name, folder in folders.items() if (folder / MANIFEST).is_file()]
    chosen = [command] if command in VIEWS else written
    run = config.folder_of("train")
    trained = command is None and (run / METRICS_FILE).is_file()
    if trained and root.resolve() == run.resolve():
        chosen = []
    elif not chosen and not trained:
        raise TextmillError(f"{where}: nothing to show there yet; prepare a corpus first: textmill prepare {where}")
    for number, name in enumerate(chosen):
        print("\n" if number else "", end="")
        VIEWS[str(name)][1](config)
    if trained:
        print("\n" if chosen else "", end="")
        show_run(config)
