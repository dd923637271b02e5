"""Cached predictions of teachers: files with one record for each sample of a run, read together with its batches.

A record has the teachers' most likely tokens at each position, their log-probabilities, and a hash of the sample, so
that predictions are never used for other tokens than those that the teachers read.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.tokens.batches.batch import Batch

FILE_BYTES = 1 << 26
"""A file has as many records as fit into this, and at least one."""


def record_of(length: int, top_k: int, vocab: int, *, exact: bool) -> np.dtype[Any]:
    """A sample's record: log-probabilities are float32 if `exact`, else float16."""
    ids = "<u2" if vocab <= 1 << 16 else "<u4"
    logs = "<f4" if exact else "<f2"
    return np.dtype([("hash", "<u8"), ("ids", ids, (length, top_k)), ("logs", logs, (length, top_k + 1))])


def records_per_file(record: np.dtype[Any]) -> int:
    """Records of every file but the last."""
    return max(1, FILE_BYTES // record.itemsize)


def file_name(number: int) -> str:
    """The name of a file of records."""
    return f"{number:06d}.bin"


def hash_samples(batch: Batch) -> NDArray[np.uint64]:
    """A hash of what a teacher reads of each sample."""
    fields = [one for one in (batch.inputs, batch.documents, batch.types) if one is not None]
    rows = (b"".join(one[row].tobytes() for one in fields) for row in range(len(batch.inputs)))
    return np.array([int.from_bytes(hashlib.blake2b(row, digest_size=8).digest(), "little") for row in rows], np.uint64)


def encode_records(
    record: np.dtype[Any], batch: Batch, ids: NDArray[Any], logs: NDArray[np.float32]
) -> NDArray[np.void]:
    """The records of a batch's samples."""
    rows = np.zeros(len(batch.inputs), record)
    rows["hash"] = hash_samples(batch)
    rows["ids"] = ids
    rows["logs"] = logs
    return rows


class TeacherCache:
    """The records of all samples of a run, memory-mapped."""

    def __init__(self, folder: Path, record: np.dtype[Any], samples: int, per_file: int, vocab: int) -> None:
        self.folder = folder
        self.record = record
        self.samples = samples
        self.per_file = per_file
        self.vocab = vocab
        self._open = lru_cache(maxsize=64)(self._map)

    def _map(self, number: int) -> NDArray[np.void]:
        return np.memmap(self.folder / file_name(number), self.record, "r")

    def attach(self, batch: Batch) -> Batch:
        """The batch with the teachers' predictions for its samples."""
        if len(batch.samples) and (last := int(batch.samples.max())) >= self.samples:
            raise TextmillError(
                f"train.distil.cache: {self.folder} has the predictions of {self.samples:,} samples, and the run needs "
                f"that of sample {last:,}; write more with: textmill cache-teacher WHERE --force"
            )
        rows = np.empty(len(batch.samples), self.record)
        files = batch.samples // self.per_file
        for number in np.unique(files).tolist():
            here = files == number
            rows[here] = self._open(number)[batch.samples[here] % self.per_file]
        if (wrong := np.flatnonzero(rows["hash"] != hash_samples(batch))).size:
            raise TextmillError(
                f"train.distil.cache: {self.folder}: sample {int(batch.samples[wrong[0]]):,} of this run has other "
                "tokens than the teachers read; write the predictions again with: textmill cache-teacher WHERE --force"
            )
        if (highest := int(rows["ids"].max(initial=0))) >= self.vocab:
            raise TextmillError(
                f"train.distil.cache: {self.folder}: has the token {highest:,}, and the vocabulary {self.vocab:,} "
                "tokens; a file is damaged; write the predictions again with: textmill cache-teacher WHERE --force"
            )
        return replace(batch, teacher_ids=rows["ids"].astype(np.int32), teacher_logs=rows["logs"].astype(np.float32))
