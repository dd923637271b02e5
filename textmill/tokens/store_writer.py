"""Writes a token store as a stream, in constant memory; the files appear under their names only when complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from textmill.errors import TextmillError
from textmill.storage.files import fsync_path
from textmill.tokens.index_formats import BLOCK, CODES, IndexFormat, index_blocks
from textmill.tokens.store import TokenStore, loss_mask_path, store_paths


class StoreWriter:
    """Appends documents to a store; lengths and document ends go to temporary files until the index is written."""

    def __init__(
        self, prefix: Path, dtype: np.dtype[Any], index_format: IndexFormat = "mmap", has_loss_mask: bool = False
    ) -> None:
        self.prefix, self.dtype, self.index_format = prefix, np.dtype(dtype), index_format
        if self.dtype not in CODES:
            raise TextmillError(
                f"{prefix}: token ids of dtype {dtype} cannot be stored; the format knows {', '.join(map(str, CODES))}"
            )
        self.largest_id = int(np.iinfo(self.dtype).max)
        self.sequences = 0
        self._ids, self._lengths, self._documents = (
            self._open(suffix) for suffix in (".bin", ".lengths", ".documents")
        )
        self._mask = self._open(".mask") if has_loss_mask else None

    def add(self, documents: Sequence[Any]) -> None:
        """Add documents of one sequence each."""
        if len(documents):
            lengths = np.fromiter((len(document) for document in documents), np.int64, len(documents))
            self.add_flat(np.concatenate([np.asarray(document, np.int64) for document in documents]), lengths)

    def add_flat(
        self,
        ids: NDArray[Any],
        lengths: NDArray[Any],
        sequences: NDArray[Any] | None = None,
        loss_mask: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add documents as one array of ids and the lengths of their sequences.

        `sequences`: how many sequences each document has (default: one each).
        `loss_mask`: 1 for each token with loss; required if the store has a loss mask.
        """
        if len(ids) and (int(ids.max()) > self.largest_id or int(ids.min()) < 0):
            worst = int(ids.max()) if int(ids.max()) > self.largest_id else int(ids.min())
            raise TextmillError(
                f"{self.prefix}: token id {worst} does not fit into {self.dtype}; "
                f"the store was made for a smaller vocabulary"
            )
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise TextmillError(
                f"{self.prefix}: a document has {int(np.max(lengths)):,} tokens; "
                f"the format allows 2,147,483,647 at most"
            )
        counts = np.ones(len(lengths), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        if int(np.sum(lengths)) != len(ids) or int(counts.sum()) != len(lengths):
            raise ValueError(
                f"{len(ids)} ids but lengths sum to {int(np.sum(lengths))}; "
                f"{len(lengths)} sequences but counts sum to {int(counts.sum())}"
            )
        self._add_mask(loss_mask, len(ids))
        self._ids.write(np.ascontiguousarray(ids.astype(self.dtype, copy=False)).data)
        self._lengths.write(np.asarray(lengths, np.int32).tobytes())
        self._documents.write((self.sequences + np.cumsum(counts)).tobytes())
        self.sequences += len(lengths)

    def _add_mask(self, loss_mask: NDArray[np.uint8] | None, tokens: int) -> None:
        if (loss_mask is None) != (self._mask is None) or (loss_mask is not None and len(loss_mask) != tokens):
            found = 0 if loss_mask is None else len(loss_mask)
            raise ValueError(f"{self.prefix}: a loss mask of {found} for {tokens} ids")
        if self._mask is not None and loss_mask is not None:
            self._mask.write(np.ascontiguousarray(loss_mask, np.uint8).data)

    def add_store(self, store: TokenStore) -> None:
        """Add all documents of another store, unchanged, in blocks."""
        if store.ids.dtype != self.dtype:
            raise TextmillError(
                f"{store.prefix}: has {store.ids.dtype} ids and {self.prefix} has {self.dtype}; "
                f"only stores of the same dtype can be joined"
            )
        if (store.loss_mask is None) != (self._mask is None):
            raise TextmillError(
                f"{store.prefix}: a store has either conversations or plain text, not both; "
                f"join stores of the same kind"
            )
        step = 8 * BLOCK
        for start in range(0, store.tokens, step):
            if store.loss_mask is not None:
                self._add_mask(store.loss_mask[start : start + step], len(store.ids[start : start + step]))
            self._ids.write(np.ascontiguousarray(store.ids[start : start + step]).data)
        lengths = store.lengths
        documents = store.index.documents
        for start in range(0, len(lengths), BLOCK):
            self._lengths.write(np.asarray(lengths[start : start + BLOCK], np.int32).tobytes())
        shift = self.sequences - int(documents[store.first_document])
        for start in range(store.first_document, store.first_document + len(store), BLOCK):
            ends = documents[start + 1 : min(start + BLOCK, store.first_document + len(store)) + 1]
            self._documents.write((ends + np.int64(shift)).astype(np.int64).tobytes())
        self.sequences += len(lengths)

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for stream in (self._ids, self._lengths, self._documents, self._mask):
                if stream is not None:
                    stream.close()
            if kind is None:
                self._write_index()
                index_path, ids_path = store_paths(self.prefix)
                if self._mask is not None:
                    fsync_path(self._temporary(".mask"))
                    os.replace(self._temporary(".mask"), loss_mask_path(self.prefix))
                # The ids first: if the index exists, the pair is complete.
                os.replace(self._temporary(".bin"), ids_path)
                os.replace(self._temporary(".idx"), index_path)
        finally:
            for suffix in (".bin", ".lengths", ".documents", ".idx", ".mask"):
                self._temporary(suffix).unlink(missing_ok=True)

    def _write_index(self) -> None:
        fsync_path(self._temporary(".bin"))
        lengths, documents = (
            _memory_map(self._temporary(suffix), dtype)
            for suffix, dtype in ((".lengths", np.int32), (".documents", np.int64))
        )
        with open(self._temporary(".idx"), "wb") as index:
            index.writelines(index_blocks(self.index_format, self.dtype, lengths, documents))
        fsync_path(self._temporary(".idx"))

    def _open(self, suffix: str) -> BinaryIO:
        return open(self._temporary(suffix), "wb")

    def _temporary(self, suffix: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.tmp-{os.getpid()}{suffix}")


def _memory_map(path: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
