"""The command show: prints what is in a folder, for people to read."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.commands.show.corpus import show_corpus
from textmill.commands.show.dropped import show_dropped
from textmill.commands.show.models import show_model
from textmill.commands.show.steps import show_step
from textmill.commands.show.tokenizers import show_tokenizer
from textmill.commands.show.tokens import save_token_counts, show_tokens
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.reports.run_files import is_run, read_run
from textmill.reports.texts import describe_run
from textmill.storage.stages import MANIFEST, open_manifest
from textmill.where import open_where

WRITTEN_BY = {"prepare": "corpus", "fit-tokenizer": "tokenizer", "tokenize": "tokens", "export": "model"}
"""What is in a folder with a manifest, by the command that wrote it."""


def show(
    where: str,
    settings: list[str] | None = None,
    step: int | None = None,
    dropped: str | None = None,
    counts: str | None = None,
) -> None:
    """Print what is at WHERE: a corpus, tokenizer, token stores, run or model, or each of them for a project; or the
    documents that a training step saw, or those that a rule dropped; or write the counts of tokens to a file."""
    given = [value for value in (step, dropped, counts) if value is not None]
    kind = None if given else find_kind(Path(where))
    if kind == "model":
        show_model(Path(where))
    elif kind == "tokenizer":
        show_tokenizer(Path(where))
    elif kind == "run":
        _show_run(Path(where))
    else:
        config = open_where(where, settings or []).config
        if dropped is not None:
            show_dropped(config, dropped)
        elif step is not None:
            show_step(config, step)
        elif counts is not None:
            save_token_counts(config, Path(counts))
        else:
            _show_stages(config, where, only=kind)


def find_kind(folder: Path) -> str | None:
    """What a folder holds: corpus, tokenizer, tokens, run or model; None if it is a project, or not a folder."""
    if (folder / MANIFEST).is_file() and (kind := WRITTEN_BY.get(open_manifest(folder).get("verb", ""))):
        return kind
    if is_run(folder) and not (folder / "progress.json").is_file():
        return "run"
    if (folder / "config.json").is_file() or is_adapter(folder):
        return "model"
    return "tokenizer" if (folder / "tokenizer.json").is_file() else None


def _show_run(folder: Path) -> None:
    print("\n".join(describe_run(read_run(folder))))


def _show_stages(config: RunConfig, where: str, only: str | None) -> None:
    """Print the corpus or token stores, or all stages of a project that are done."""
    views: dict[str, Callable[[], None]] = {
        "corpus": lambda: show_corpus(config),
        "tokenizer": lambda: show_tokenizer(config.folder_of("tokenizer")),
        "tokens": lambda: show_tokens(config),
        "run": lambda: _show_run(config.folder_of("train")),
    }
    written = [name for name in ("corpus", "tokenizer", "tokens") if _has_manifest(config, name)]
    written += ["run"] if is_run(config.folder_of("train")) else []
    chosen = [only] if only else written
    if not chosen:
        raise TextmillError(
            f"{where}: nothing to show there yet; prepare a corpus first: textmill prepare {shlex.quote(str(where))}"
        )
    for number, name in enumerate(chosen):
        print("\n" if number else "", end="")
        views[name]()


def _has_manifest(config: RunConfig, stage: str) -> bool:
    return (config.folder_of(stage) / MANIFEST).is_file()  # type: ignore[arg-type]
