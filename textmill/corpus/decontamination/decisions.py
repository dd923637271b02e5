"""Decide which documents are contaminated, from the n-grams that the first pass found in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.decontamination.evaluation_data import EvaluationData, IndexFacts, names_of
from textmill.corpus.dedup.decisions import Decisions
from textmill.corpus.dropped import CONTAMINATED
from textmill.corpus.passes import ChunkTask
from textmill.ranges import expand_ranges
from textmill.storage.files import write_bytes


def drop_contaminated(
    tasks: Sequence[ChunkTask],
    decisions: Decisions,
    data: Sequence[EvaluationData],
    facts: IndexFacts,
    config: CorpusConfig,
) -> dict[str, Any]:
    """Drop contaminated documents from those that are kept so far, or only list them for `write_chunk` to mark.

    Returns for each file of evaluation data how many of its examples were found, and in how many documents. An n-gram
    in `corpus.decontaminate_common` documents or more is a common phrase and does not count.
    """
    occurrences = np.zeros(facts.keys, np.int64)  # of each key, in documents that are kept so far
    for task, split in zip(tasks, decisions.splits, strict=True):
        rows, keys = _read_hits(task)
        occurrences += np.bincount(keys[split[rows] >= 0], minlength=len(occurrences))
    is_rare = occurrences < config.decontaminate_common if config.decontaminate_common else occurrences > 0
    bounds = np.cumsum([0, *facts.examples])
    files = _files_by_key(facts, bounds)
    documents_by_file = np.zeros(len(data), np.int64)
    for task, split, dropped in zip(tasks, decisions.splits, decisions.dropped, strict=True):
        rows, keys = _read_hits(task)
        is_hit = (split[rows] >= 0) & is_rare[keys]
        contaminated = np.unique(rows[is_hit])
        write_bytes(task.path("contaminated"), [contaminated.tobytes()])
        pairs = np.unique(files.expand(rows[is_hit], keys[is_hit]), axis=0)
        documents_by_file += np.bincount(pairs[:, 1], minlength=len(data))
        if config.decontaminate_action == "drop" and len(contaminated):
            split[contaminated] = -1
            dropped[CONTAMINATED] = len(contaminated)
    is_found = is_rare & (occurrences > 0)
    found_examples = np.unique(facts.owners[is_found[facts.owners[:, 0]], 1])
    found_by_file = np.histogram(found_examples, bounds)[0]
    return {
        name: {
            "examples": facts.examples[file],
            "too_short": facts.too_short[file],
            "found": int(found_by_file[file]),
            "documents": int(documents_by_file[file]),
        }
        for file, name in enumerate(names_of(data))
    }


@dataclass(frozen=True)
class _FilesByKey:
    """The files that have each n-gram: those of key k are files[starts[k] : starts[k + 1]]."""

    starts: NDArray[np.int64]
    files: NDArray[np.int64]

    def expand(self, rows: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """[pairs, 2]: each row with each file of its n-gram."""
        counts = self.starts[keys + 1] - self.starts[keys]
        files = self.files[expand_ranges(self.starts[keys], counts)]
        return np.stack([np.repeat(rows, counts), files], axis=1)


def _files_by_key(facts: IndexFacts, bounds: NDArray[np.int64]) -> _FilesByKey:
    """`bounds`: the number of the first example of each file, and the end."""
    file_of_example = np.searchsorted(bounds, facts.owners[:, 1], "right") - 1
    pairs = np.unique(np.stack([facts.owners[:, 0], file_of_example], axis=1), axis=0)
    return _FilesByKey(np.searchsorted(pairs[:, 0], np.arange(facts.keys + 1)), pairs[:, 1])


def _read_hits(task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows and the keys of the hits of a chunk."""
    pairs = np.fromfile(task.path("hits"), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
