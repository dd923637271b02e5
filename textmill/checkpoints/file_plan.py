"""The file plan of a checkpoint: which tensors go into which file, and which rank writes it.

Three tensors of 3 GB on two ranks, with files of at most 5 GB: model-00001-of-00003.safetensors is written by rank 0,
-00002- by rank 1, -00003- by rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from textmill.storage.files import write_bytes
from textmill.storage.tensor_files import Named, encode_safetensors

MAX_FILE_BYTES = 5_000_000_000
"""Default for the most bytes of tensors in one file."""


class FilePlan:
    """Distributes tensors over files below a size limit, and the files over ranks in turn.

    All ranks add the same tensors in the same order, so they get the same plan without talking to each other.
    """

    def __init__(
        self,
        stem: str,
        size_of: Callable[[str], int],
        max_bytes: int = MAX_FILE_BYTES,
        rank: int = 0,
        world: int = 1,
        first_writer: int = 0,
    ) -> None:
        self.stem = stem
        self.size_of = size_of
        self.max_bytes = max_bytes
        self.rank = rank
        self.world = world
        self.first_writer = first_writer
        self.files: list[dict[str, int]] = []
        """For each file, its tensors and their bytes."""

    def add(self, name: str) -> bool:
        """Add the next tensor; return whether this rank writes it."""
        size = self.size_of(name)
        if not self.files or sum(self.files[-1].values()) + size > self.max_bytes:
            self.files.append({})
        self.files[-1][name] = size
        return (self.first_writer + len(self.files) - 1) % self.world == self.rank

    def file_by_tensor(self) -> dict[str, str]:
        """The file name of each tensor, as transformers names shards."""
        names = [f"{self.stem}.safetensors"]
        if (count := len(self.files)) > 1:
            names = [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        return {tensor: name for name, file in zip(names, self.files, strict=False) for tensor in file}

    def index(self) -> dict[str, Any]:
        """The shard index of transformers, needed when there is more than one file."""
        return {
            "metadata": {"total_size": sum(sum(file.values()) for file in self.files)},
            "weight_map": self.file_by_tensor(),
        }


def plan_files(stem: str, named: Iterable[Named], max_bytes: int = MAX_FILE_BYTES) -> tuple[FilePlan, list[Named]]:
    """A file plan for tensors that are all in this process, and these tensors as a list."""
    tensors = list(named)
    plan = FilePlan(stem, {name: values.nbytes for name, values in tensors}.__getitem__, max_bytes)
    for name, _ in tensors:
        plan.add(name)
    return plan, tensors


def write_planned_files(
    folder: Path, plan: FilePlan, named: Iterable[Named], report: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> dict[str, dict[str, Any]]:
    """Write this rank's files; return their manifest entries. `report` wraps the blocks as they are written."""
    file_by_tensor = plan.file_by_tensor()
    entries = {}
    for file_name, tensors in itertools.groupby(named, lambda tensor: file_by_tensor[tensor[0]]):
        entries[file_name] = write_bytes(folder / file_name, report(encode_safetensors(list(tensors))))
    if not file_by_tensor and plan.rank == plan.first_writer % plan.world:  # no tensors at all: an empty file
        file_name = f"{plan.stem}.safetensors"
        entries[file_name] = write_bytes(folder / file_name, encode_safetensors([]))
    return entries
