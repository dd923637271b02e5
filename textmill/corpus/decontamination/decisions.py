"""Decide which documents are contaminated, from the n-grams that the first pass found in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.config import CorpusConfig
from textmill.corpus.decontamination.evaluation_data import EvaluationData, IndexFacts
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
    occurrences = np.zeros(len(facts.example_of), np.int64)
    for task, split in zip(tasks, decisions.splits, strict=True):
        rows, keys = _read_hits(task)
        occurrences += np.bincount(keys[split[rows] >= 0], minlength=len(occurrences))
    is_rare = occurrences < config.decontaminate_common if config.decontaminate_common else occurrences > 0
    bounds = np.cumsum([0, *facts.examples])
    files = np.searchsorted(bounds, facts.example_of, "right") - 1
    documents = np.zeros(len(data), np.int64)
    for task, split, dropped in zip(tasks, decisions.splits, decisions.dropped, strict=True):
        rows, keys = _read_hits(task)
        is_hit = (split[rows] >= 0) & is_rare[keys]
        found = np.unique(rows[is_hit])
        write_bytes(task.path("contaminated"), [found.tobytes()])
        pairs = np.unique(np.stack([rows[is_hit], files[keys[is_hit]]], axis=1), axis=0)
        documents += np.bincount(pairs[:, 1], minlength=len(data))
        if config.decontaminate_action == "drop" and len(found):
            split[found] = -1
            dropped[CONTAMINATED] = len(found)
    examples = np.histogram(np.unique(facts.example_of[is_rare & (occurrences > 0)]), bounds)[0]
    return {
        one.name: {"examples": total, "too_short": short, "found": int(hit), "documents": int(count)}
        for one, total, short, hit, count in zip(
            data, facts.examples, facts.too_short, examples, documents, strict=True
        )
    }


def _read_hits(task: ChunkTask) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pairs = np.fromfile(task.path("hits"), np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]
