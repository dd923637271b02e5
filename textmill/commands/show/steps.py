"""Prints what a training step saw: its documents, and where each came from."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from textmill.checkpoints.folders import find_checkpoint
from textmill.config import RunConfig
from textmill.errors import TextmillError, warn
from textmill.storage.files import format_path
from textmill.storage.stages import list_changes
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.lineage import Lineage, lineage_path, open_lineage
from textmill.tokens.splits import open_splits
from textmill.tokens.store import TokenStore
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.training.changing import data_ranges
from textmill.training.run_folder import INDEX_FOLDER

DECISIVE = (
    "tokens",
    "train.layout",
    "train.seed",
    "train.batch",
    "train.batch_rampup",
    "train.packed.isolate_documents",
    "train.packed.last_window",
    "train.padded.long_documents",
    "train.padded.end_truncated",
)
"""The settings that decide which documents a step sees."""
SHOWN_CHARACTERS = 60
"""How much of a document is printed."""


def show_step(config: RunConfig, step: int) -> None:
    """List the documents of every sample of a step; the first step is 1, as in the metrics."""
    if step < 1:
        raise TextmillError(f"--step: found {step}; the first step is 1")
    run = config.folder_of("train")
    splits = open_splits(config)
    checkpoint = find_checkpoint(run, "latest")
    made_from = checkpoint.progress["made_from"] if checkpoint else {}
    now = {**config.results("train"), "tokens": splits.fingerprint}
    seen = {name: made_from[name] for name in DECISIVE if name in made_from}
    if changes := list_changes(seen, {name: now[name] for name in seen}):
        raise TextmillError(
            f"{run}: was trained with other settings: {'; '.join(changes)}; use those of the run: "
            f"textmill show {shlex.quote(format_path(run))}"
        )
    length = made_from.get("train.length", config.train.length)
    if not length:
        raise TextmillError(f"{run}: has no checkpoint yet, so the length of a sample is not known; set train.length")
    history = data_ranges(checkpoint.progress.get("ranges", [])) if checkpoint else []
    batches = open_batches(config.train, splits, length=length, folder=run / INDEX_FOLDER, history=history)
    if checkpoint and step > checkpoint.step:
        warn(f"step {step:,} has not been trained; the last checkpoint is step {checkpoint.step:,}")
    print(f"{format_path(run)}: step {step:,}: {batches.sizes.size_at(step - 1):,} samples of {length:,} tokens")
    paths = [lineage_path(share.store.prefix) for share in splits.by_split["train"]]
    lineages = [open_lineage(path) if path.is_file() else None for path in paths]
    for sample, number, document in sorted(batches.documents_at(step - 1), key=lambda found: found[0]):
        described = _describe(splits.by_split["train"][number].store, document, splits.tokenizer, lineages[number])
        print(f"  sample {sample:,}: {described}")


def _describe(store: TokenStore, document: int, tokenizer: TextTokenizer, lineage: Lineage | None) -> str:
    """Where a document came from, or its place in the token store, and how it begins."""
    begin, end = store.document_starts(np.array([document, document + 1])).tolist()
    text = tokenizer.decode(np.asarray(store.ids[begin : min(end, begin + SHOWN_CHARACTERS)]).tolist())
    place = f"{format_path(store.prefix)} document {store.first_document + document:,}"
    if lineage is not None:
        source, id_ = lineage[store.first_document + document]
        place = f"{format_path(Path(source))}, {id_}"
    return f"{place}, {end - begin:,} tokens: {text[:SHOWN_CHARACTERS]!r}"
