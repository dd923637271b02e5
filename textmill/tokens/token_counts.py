"""How often each token occurs in the train split: a JSON file that the masked layout reads."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import read_json, write_json
from textmill.tokens.index_formats import BLOCK
from textmill.tokens.store import TokenStore


def count_tokens(stores: Iterable[TokenStore], vocab: int, most: int | None = None) -> NDArray[np.int64]:
    """[vocab]: how often each id occurs in these stores, or in their first `most` tokens."""
    counts = np.zeros(vocab, np.int64)
    for store in stores:
        stop = store.tokens if most is None else min(most, store.tokens)
        for start in range(0, stop, BLOCK):
            ids = np.asarray(store.ids[start : min(start + BLOCK, stop)], np.int64)
            counts += np.bincount(ids, minlength=vocab)[:vocab]
        most = None if most is None else most - stop
    return counts


def write_token_counts(path: Path, counts: NDArray[np.int64], tokenizer: str) -> None:
    """Write counts, and the fingerprint of the tokenizer whose ids were counted."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"tokenizer": tokenizer, "counts": counts.tolist()})


def read_token_counts(path: Path, tokenizer: str) -> NDArray[np.int64]:
    """[vocab]: the counts in a file; raises an error if they are of another tokenizer."""
    if not path.is_file():
        raise TextmillError(
            f"train.masked.counts: {path}: file not found; write it with: textmill show WHERE --counts {path}"
        )
    found = read_json(path)
    counts = found.get("counts") if isinstance(found, dict) else None
    if not isinstance(counts, list) or not all(isinstance(count, int) and count >= 0 for count in counts):
        raise TextmillError(f"{path}: not a file of token counts; write one with: textmill show WHERE --counts {path}")
    if found.get("tokenizer") != tokenizer:
        raise TextmillError(
            f"{path}: counts the ids of another tokenizer; write it again with: textmill show WHERE --counts {path}"
        )
    return np.array(counts, np.int64)
