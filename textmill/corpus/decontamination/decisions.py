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
    occurrences = np.zeros(facts.keys, np.int64)
    for task, split in zip(tasks, decisions.splits, strict=True):
        rows, keys = _read_hits(task)
        occurrences += np.bincount(keys[split[rows] >= 0], minlength=len(occurrences))
    is_rare = occurrences < config.decontaminate_common if config.decontaminate_common else occurrences > 0
    bounds = np.cumsum([0, *facts.examples])
    files = _files_by_key(facts, bounds)
    documents = np.zeros(len(data), np.int64)
    for task, split, dropped in zip(tasks, decisions.splits, decisions.dropped, strict=True):
        rows, keys = _read_hits(task)
        is_hit = (split[rows] >= 0) & is_rare[keys]
        found = np.unique(rows[is_hit])
        write_bytes(task.path("contaminated"), [found.tobytes()])
        pairs = np.unique(files.expand(rows[is_hit], keys[is_hit]), axis=0)
        documents += np.bincount(pairs[:, 1], minlength=len(data))
        if config.decontaminate_action == "drop" and len(found):
            split[found] = -1
            dropped[CONTAMINATED] = len(found)
    is_found = is_rare & (occurrences > 0)
    examples = np.histogram(np.unique(facts.owners[is_found[facts.owners[:, 0]], 1]), bounds)[0]
    return {
        name: {"examples": total, "too_short": short, "found": int(hit), "documents": int(count)}
        for name, total, short, hit, count in zip(
            names_of(data), facts.examples, facts.too_short, examples, documents, strict=True
        )
    }


@dataclass(frozen=True)
class _FilesByKey:
    """The files that have each n-gram, joined."""

    starts: NDArray[np.int64]
    """Where the files of each n-gram start, and the end."""
    files: NDArray[np.int64]

    def expand(self, rows: NDArray[np.int64], keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """[pairs, 2]: each row with each file of its n-gram."""
        counts = self.starts[keys + 1] - self.starts[keys]
        ends = np.cumsum(counts)
        places = np.repeat(self.starts[keys] - ends + counts, counts) + np.arange(int(counts.sum()))
        return np.stack([np.repeat(rows, counts), self.files[places]], axis=1)


def _files_by_key(facts: IndexFacts, bounds: NDArray[np.int64]) -> _FilesByKey:
    owners = np.searchsorted(bounds, facts.owners[:, 1], "right") - 1
    pairs = np.unique(np.stack([facts.owners[:, 0], owners], axis=1), axis=0)
    return _FilesByKey(np.searchsorted(pairs[:, 0], np.arange(facts.keys + 1)), pairs[:, 1])


def _read_hits(task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pairs = np.fromfile(task.path("hits"), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
