"""Prints documents that prepare dropped: which rule dropped them and, for duplicates, what they repeat."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.corpus.dropped import list_dropped_files, read_dropped
from textmill.errors import TextmillError
from textmill.storage.files import format_path, read_json
from textmill.storage.stages import open_manifest

ALL = "all"
SHOWN_DOCUMENTS = 20
SHOWN_CHARACTERS = 400


def show_dropped(config: RunConfig, rule: str) -> None:
    """Print the first documents that a rule dropped, or that any rule did if it is `all`."""
    folder = config.folder_of("corpus")
    open_manifest(folder)
    counts: dict[str, int] = read_json(folder / "account.json")["dropped"]
    if not list_dropped_files(folder):
        raise TextmillError(
            f"{format_path(folder)}: dropped documents were not kept; "
            "run: textmill prepare WHERE corpus.keep_dropped=true --force"
        )
    if rule not in (ALL, *counts):
        found = ", ".join(counts) or "none"
        raise TextmillError(f"--dropped: no document was dropped by '{rule}'; rules that dropped any: {found}")
    total = sum(counts.values()) if rule == ALL else counts[rule]
    print(f"{format_path(folder)}: {total:,} documents dropped by {rule if rule != ALL else 'all rules'}")
    for row in islice(read_dropped(folder, None if rule == ALL else rule), SHOWN_DOCUMENTS):
        print(_format(row))
    if total > SHOWN_DOCUMENTS:
        print(f"... and {total - SHOWN_DOCUMENTS:,} more, in {format_path(folder)}/dropped-*.parquet")


def _format(row: dict[str, Any]) -> str:
    text = row["text"] if len(row["text"]) <= SHOWN_CHARACTERS else row["text"][:SHOWN_CHARACTERS] + " ..."
    head = f"--- {format_path(Path(row['source']))}, {row['id']}: {row['rule']}"
    if row["duplicate_of_id"] is not None:
        head += f" of {format_path(Path(row['duplicate_of_source']))}, {row['duplicate_of_id']}"
        head += f" (similarity {row['similarity']:.2f})" if row["similarity"] < 1 else ""
    return f"{head}\n{text}"
