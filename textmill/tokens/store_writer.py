"""Writing a token store as a stream: memory stays flat, and the pair appears under its name only when it is whole."""

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
from textmill.tokens.index_formats import BLOCK, CODES, Format, index_blocks
from textmill.tokens.store import TokenStore, mask_path, paths_of


class StoreWriter:
    """Takes documents one after the other; lengths and document ends wait in files until the index is written."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any], form: Format = "mmap", masked: bool = False) -> None:
        self.prefix, self.dtype, self.form = prefix, np.dtype(dtype), form
        if self.dtype not in CODES:
            raise TextmillError(f"{prefix}: token ids of dtype {dtype} have no code in the store's format")
        self.largest = int(np.iinfo(self.dtype).max)
        self.sequences = 0
        self._ids, self._lengths, self._documents = (
            self._open(ending) for ending in (".bin", ".lengths", ".documents")
        )
        self._mask = self._open(".mask") if masked else None

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
        asked: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add documents as one array of ids and their sequences' lengths; `sequences` counts those of each document, else one each.

        `asked` says of each token whether it bears loss, in a store that keeps this."""
        if len(ids) and (int(ids.max()) > self.largest or int(ids.min()) < 0):
            worst = int(ids.max()) if int(ids.max()) > self.largest else int(ids.min())
            raise TextmillError(
                f"{self.prefix}: token id {worst} does not fit {self.dtype}; the store was made for a smaller vocabulary"
            )
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise TextmillError(
                f"{self.prefix}: a document of {int(np.max(lengths)):,} tokens; the format holds 2,147,483,647 at most"
            )
        counts = np.ones(len(lengths), np.int64) if sequences is None else np.asarray(sequences, np.int64)
        if int(np.sum(lengths)) != len(ids) or int(counts.sum()) != len(lengths):
            raise ValueError(
                f"{len(ids)} ids, lengths of {int(np.sum(lengths))}; {len(lengths)} sequences, counts of {int(counts.sum())}"
            )
        self._add_mask(asked, len(ids))
        self._ids.write(np.ascontiguousarray(ids.astype(self.dtype, copy=False)).data)
        self._lengths.write(np.asarray(lengths, np.int32).tobytes())
        self._documents.write((self.sequences + np.cumsum(counts)).tobytes())
        self.sequences += len(lengths)

    def _add_mask(self, asked: NDArray[np.uint8] | None, tokens: int) -> None:
        if (asked is None) != (self._mask is None) or (asked is not None and len(asked) != tokens):
            raise ValueError(f"{self.prefix}: a mask of {0 if asked is None else len(asked)} for {tokens} ids")
        if self._mask is not None and asked is not None:
            self._mask.write(np.ascontiguousarray(asked, np.uint8).data)

    def add_store(self, store: TokenStore) -> None:
        """Add another store's documents as they are, in blocks."""
        if store.ids.dtype != self.dtype:
            raise TextmillError(
                f"{store.prefix}: {store.ids.dtype}, {self.prefix}: {self.dtype}; only stores of one dtype can be joined"
            )
        if (store.asked is None) != (self._mask is None):
            raise TextmillError(
                f"{store.prefix}: of conversations and plain text only one can be in a store; join like with like"
            )
        step = 8 * BLOCK
        for start in range(0, store.tokens, step):
            if store.asked is not None:
                self._add_mask(store.asked[start : start + step], len(store.ids[start : start + step]))
            self._ids.write(np.ascontiguousarray(store.ids[start : start + step]).data)
        lengths, documents = store.lengths, store.index.documents
        for start in range(0, len(lengths), BLOCK):
            self._lengths.write(np.asarray(lengths[start : start + BLOCK], np.int32).tobytes())
        shift = self.sequences - int(documents[store.first])
        for start in range(store.first, store.first + len(store), BLOCK):
            ends = documents[start + 1 : min(start + BLOCK, store.first + len(store)) + 1]
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
                index_path, ids_path = paths_of(self.prefix)
                if self._mask is not None:
                    fsync_path(self._temporary(".mask"))
                    os.replace(self._temporary(".mask"), mask_path(self.prefix))
                # The ids first: a pair with an index is a whole pair.
                os.replace(self._temporary(".bin"), ids_path)
                os.replace(self._temporary(".idx"), index_path)
        finally:
            for ending in (".bin", ".lengths", ".documents", ".idx", ".mask"):
                self._temporary(ending).unlink(missing_ok=True)

    def _write_index(self) -> None:
        fsync_path(self._temporary(".bin"))
        lengths, documents = (
            _mapped(self._temporary(ending), dtype)
            for ending, dtype in ((".lengths", np.int32), (".documents", np.int64))
        )
        with open(self._temporary(".idx"), "wb") as index:
            index.writelines(index_blocks(self.form, self.dtype, lengths, documents))
        fsync_path(self._temporary(".idx"))

    def _open(self, ending: str) -> BinaryIO:
        return open(self._temporary(ending), "wb")

    def _temporary(self, ending: str) -> Path:
        return self.prefix.with_name(f"{self.prefix.name}.tmp-{os.getpid()}{ending}")


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
