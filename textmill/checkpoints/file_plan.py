"""Deals: which tensors go into which file of a checkpoint, and which process writes it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from textmill.storage.files import write_bytes
from textmill.storage.tensor_files import Named, encode_safetensors

MAX_FILE_BYTES = 5_000_000_000
"""Bytes of tensors in a file, if nothing else is said."""


class FilePlan:
    """Tensors dealt into files as they are named, none above the limit, and the files to processes in turn: the same on all of them."""

    def __init__(
        self,
        stem: str,
        size_of: Callable[[str], int],
        limit: int = MAX_FILE_BYTES,
        rank: int = 0,
        world: int = 1,
        turn: int = 0,
    ) -> None:
        self.stem, self.size_of, self.limit = stem, size_of, limit
        self.rank, self.world, self.turn = rank, world, turn
        self.files: list[dict[str, int]] = []
        """Of each file its tensors and their bytes."""

    def mine(self, name: str) -> bool:
        """Take the next tensor; whether this process writes it."""
        size = self.size_of(name)
        if not self.files or sum(self.files[-1].values()) + size > self.limit:
            self.files.append({})
        self.files[-1][name] = size
        return (self.turn + len(self.files) - 1) % self.world == self.rank

    def place_of(self) -> dict[str, str]:
        """The file that each tensor goes into, under the names that transformers knows."""
        names = [f"{self.stem}.safetensors"]
        if (count := len(self.files)) > 1:
            names = [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        return {tensor: name for name, file in zip(names, self.files, strict=False) for tensor in file}

    def index(self) -> dict[str, Any]:
        """What says where each tensor is, when there is more than one file."""
        return {
            "metadata": {"total_size": sum(sum(file.values()) for file in self.files)},
            "weight_map": self.place_of(),
        }


def plan_files(stem: str, named: Iterable[Named], limit: int = MAX_FILE_BYTES) -> tuple[FilePlan, list[Named]]:
    """A deal of tensors that are all at hand."""
    held = list(named)
    deal = FilePlan(stem, {name: values.nbytes for name, values in held}.__getitem__, limit)
    for name, _ in held:
        deal.mine(name)
    return deal, held


def write_planned_files(
    folder: Path, deal: FilePlan, named: Iterable[Named], heard: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> dict[str, dict[str, Any]]:
    """Write this process's files, one at a time, `heard` of each piece; return the length and checksum of each file."""
    places = deal.place_of()
    files = itertools.groupby(named, lambda one: places[one[0]])
    accounts = {name: write_bytes(folder / name, heard(encode_safetensors(list(tensors)))) for name, tensors in files}
    if not places and deal.rank == deal.turn % deal.world:
        accounts[f"{deal.stem}.safetensors"] = write_bytes(folder / f"{deal.stem}.safetensors", encode_safetensors([]))
    return accounts
