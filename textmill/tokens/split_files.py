"""Write what follows from a token store as files of each split, by workers that a runner starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from textmill.config import RunConfig
from textmill.runners import open_runner
from textmill.storage.files import manifest_entry
from textmill.storage.progress import progress


class FileTask(Protocol):
    """The file of one worker."""

    @property
    def path(self) -> Path: ...


Task = TypeVar("Task", bound=FileTask)


def make_file_folder(folder: Path) -> None:
    """Make the folder of the files, and remove what a run that was killed left in it."""
    folder.mkdir(exist_ok=True)
    for left in folder.glob("*.tmp-*"):
        left.unlink()


def write_split_files(
    config: RunConfig, tasks: Sequence[Task], write_file: Callable[[Task], int], what: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Write the file of each task; return the number of rows, and length and checksum of each file."""
    rows = 0
    with progress(f"tokenize: {what}", total=len(tasks), unit="files") as bar:
        for count in open_runner(config.runner).map(write_file, tasks):
            rows += count
            bar.advance(1)
    return rows, {f"{task.path.parent.name}/{task.path.name}": manifest_entry(task.path) for task in tasks}
