"""What a step of a run saw: its documents, and where each came from."""

from __future__ import annotations

import numpy as np

from textmill.checkpoint import find_checkpoint
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.files import shown
from textmill.runs import INDEX
from textmill.tokens.batches.opening import open_batches
from textmill.tokens.splits import Splits, open_splits

BEGINNING = 60
"""Characters of a document that are shown."""


def show_step(config: RunConfig, step: int) -> None:
    """List the documents of every sample of a step, counted from 1 as the metrics count."""
    if step < 1:
        raise TextmillError(f"--step: found {step}; the first step is 1")
    run, splits = config.folder_of("train"), open_splits(config)
    checkpoint = find_checkpoint(run, "latest")
    length = checkpoint.progress["made_from"]["train.length"] if checkpoint else config.train.length
    if not length:
        raise TextmillError(f"{run}: has no checkpoint yet, so the samples' length is not known; set train.length")
    batches = open_batches(config.train, splits, length=length, folder=run / INDEX)
    print(f"{shown(run)}: step {step:,}: {config.train.batch:,} samples of {length:,} tokens")
    for sample, store, document in sorted(batches.seen_at(step - 1), key=lambda found: found[0]):
        print(f"  sample {sample:,}: {_told(splits, store, document)}")


def _told(splits: Splits, number: int, document: int) -> str:
    """A document's place in its store, its origin, and how it begins."""
    store = splits.stores["train"][number].store
    begin, end = store.borders(np.array([document, document + 1])).tolist()
    text = splits.tokenizer.decode(np.asarray(store.ids[begin : min(end, begin + BEGINNING)]).tolist())
    return f"{shown(store.prefix)} document {store.first + document:,}, {end - begin:,} tokens: {text[:BEGINNING]!r}"
