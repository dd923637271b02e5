"""Read MongoDB collections as one lazy sequence, by position or in order, with prefetch."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import overload

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.mongo.server import Server, check_collections, open_server
from textmill.corpus.mongo.snapshot import (
    CollectionRange,
    Row,
    find_collection_ranges,
    find_irregularities,
    text_field_names,
)
from textmill.corpus.records import RAW_BYTES, BadRecord
from textmill.corpus.text_fields import TextFields
from textmill.errors import warn

SCAN_BLOCK = 1000
"""Positions in one query of a scan."""
PREFETCH = 3
"""Queries in flight while the caller works."""
QUERY_SIZES = (24, 96, 384, 1536)
"""Positions in one `$in` query; each index measures which size is fastest for its server."""
MIN_MEASURED_BATCH = 256
"""A smaller batch is not used for measuring."""
RELEARN_BATCHES = 500
"""Batches after which the sizes are measured again."""


def open_index(path: str | Path, collection_ranges: Sequence[CollectionRange] | None = None) -> MongoIndex:
    """Open the collections of a db_config.json as one index; warn once about irregularities."""
    server = open_server(path)
    if collection_ranges is None:
        check_collections(server)
        collection_ranges = find_collection_ranges(server)
        for note in find_irregularities(server, collection_ranges):
            warn(f"{path}: {note}")
    return MongoIndex(server, collection_ranges)


def read_range(
    path: str | Path,
    start: int,
    stop: int,
    config: CorpusConfig,
    collection_ranges: Sequence[CollectionRange] | None = None,
    text_key: str | None = None,
) -> Iterator[Document | BadRecord]:
    """Yield the documents at positions start to stop.

    `collection_ranges` of an earlier call keeps positions stable while collections grow.
    """
    server = _shared(open_server(path), os.getpid())
    index = MongoIndex(server, find_collection_ranges(server) if collection_ranges is None else collection_ranges)
    key, source = text_key or config.text_key, f"mongo:{path}"
    names = text_field_names(key, read_original=config.mongo_write_back)
    conversation_fields = TextFields(source, key, (), (), None, (), chat=config.chat) if config.chat else None
    try:
        for collection, row in index.scan(start, stop):
            if conversation_fields is None:
                yield _to_document(collection, row, source, names)
            else:
                fields = {name: value for name, value in row.items() if name not in ("_id", "idx")}
                yield from conversation_fields.documents(fields, format_place(collection, row), _raw(row))
    finally:
        index.stop_prefetch()


@lru_cache(maxsize=4)
def _shared(server: Server, pid: int) -> Server:
    """One connection per process for all its ranges; a client must not be shared with a forked child."""
    return server


@dataclass
class QuerySize:
    """Chooses how many positions one query holds.

    Many suit a slow network. Few suit a server that compares each document with the whole list.
    """

    size: int = QUERY_SIZES[0]
    rates: dict[int, float] = field(default_factory=dict)
    batches: int = 0

    def learn(self, rate: float) -> None:
        """Record the rate of a batch, in documents per second; try the next size as long as it gets faster."""
        self.batches += 1
        if self.batches % RELEARN_BATCHES == 0:
            self.size, self.rates = QUERY_SIZES[0], {}
        elif len(self.rates) < len(QUERY_SIZES):
            self.rates[self.size] = rate
            best = max(self.rates, key=lambda size: self.rates[size])
            untried = [size for size in QUERY_SIZES if size not in self.rates]
            if best == self.size and untried:
                self.size = untried[0]
            else:
                self.size = best
                self.rates |= dict.fromkeys(untried, 0.0)


class MongoIndex:
    """A lazy sequence over the collections, in the order of COLLECTIONS; None for a position without a document."""

    def __init__(self, server: Server, collection_ranges: Sequence[CollectionRange]) -> None:
        self.server, self.collection_ranges, self.query_size = server, tuple(collection_ranges), QuerySize()
        self._threads = ThreadPoolExecutor(PREFETCH, thread_name_prefix="mongo")

    def __repr__(self) -> str:
        return f"MongoIndex({self.server.path}: {len(self):,} positions in {len(self.collection_ranges)} collections)"

    def __len__(self) -> int:
        return sum(collection_range.size for collection_range in self.collection_ranges)

    @overload
    def __getitem__(self, position: int) -> Row | None: ...
    @overload
    def __getitem__(self, position: slice) -> list[Row | None]: ...
    def __getitem__(self, position: int | slice) -> Row | list[Row | None] | None:
        """The document at a position, or the documents of a slice."""
        if isinstance(position, int):
            return self.batch([position])[0]
        positions = range(*position.indices(len(self)))
        if positions.step != 1:
            return self.batch(positions)
        rows: list[Row | None] = [None] * len(positions)
        firsts = {collection_range.collection: collection_range.first for collection_range in self.collection_ranges}
        for collection, row in self.scan(positions.start, positions.stop):
            at = firsts[collection] + int(row["idx"]) - positions.start
            rows[at] = rows[at] or row
        return rows

    def __iter__(self) -> Iterator[Row]:
        """Every document in order; positions without a document are skipped."""
        return (row for _, row in self.scan())

    def batch(self, positions: Sequence[int]) -> list[Row | None]:
        """The documents at any positions, in the given order, with a few queries per collection."""
        idx_by_collection: dict[str, set[int]] = {}
        locations = [self._locate(position) for position in positions]
        for collection, idx in locations:
            idx_by_collection.setdefault(collection, set()).add(idx)
        queries, size, started = [], self.query_size.size, perf_counter()
        for collection, numbers in idx_by_collection.items():
            ordered = sorted(numbers)
            queries += [(collection, {"$in": ordered[at : at + size]}) for at in range(0, len(ordered), size)]
        found: dict[tuple[str, int], Row] = {}
        for (collection, _), rows in zip(queries, self._prefetch(queries), strict=True):
            for row in rows:
                found.setdefault((collection, int(row["idx"])), row)
        if len(positions) >= MIN_MEASURED_BATCH:
            self.query_size.learn(len(found) / (perf_counter() - started))
        return [found.get(location) for location in locations]

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, Row]]:
        """Yield (collection, document) for positions start to stop, in order; later blocks are prefetched."""
        queries = list(self._scan_queries(start, len(self) if stop is None else min(stop, len(self))))
        for (collection, _), rows in zip(queries, self._prefetch(queries), strict=True):
            for row in rows:
                yield collection, row

    def stop_prefetch(self) -> None:
        """Stop the prefetch threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Close the connection."""
        self.stop_prefetch()
        self.server.close()

    def _locate(self, position: int) -> tuple[str, int]:
        at = position + len(self) if position < 0 else position
        for collection_range in self.collection_ranges:
            if collection_range.first <= at < collection_range.first + collection_range.size:
                return collection_range.collection, at - collection_range.first
        raise IndexError(f"position {position} is out of range; the index has {len(self):,}")

    def _scan_queries(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        for collection_range in self.collection_ranges:
            low = max(start - collection_range.first, 0)
            high = min(stop - collection_range.first, collection_range.size)
            for at in range(low, high, SCAN_BLOCK):
                yield collection_range.collection, {"$gte": at, "$lt": min(at + SCAN_BLOCK, high)}

    def _prefetch(self, queries: Sequence[tuple[str, Row]]) -> Iterator[list[Row]]:
        """Yield the results of all queries in order, with PREFETCH queries in flight."""
        in_flight: deque[Future[list[Row]]] = deque()
        remaining = iter(queries)
        try:
            for query in islice(remaining, PREFETCH):
                in_flight.append(self._threads.submit(self._fetch, *query))
            while in_flight:
                rows = in_flight.popleft().result()
                if (next_query := next(remaining, None)) is not None:
                    in_flight.append(self._threads.submit(self._fetch, *next_query))
                yield rows
        finally:
            for future in in_flight:
                future.cancel()

    def _fetch(self, collection: str, idx: Row) -> list[Row]:
        # A block is returned only when complete: after an outage it is requested again, so nothing is lost or read
        # twice.
        rows = self.server.request(lambda db: list(db[collection].find({"idx": idx}, batch_size=SCAN_BLOCK)))
        return sorted(rows, key=lambda row: (row["idx"], str(row["_id"])))


def format_place(collection: str, row: Row) -> str:
    """A document's place: its collection, idx and _id."""
    return f"{collection} {row.get('idx')} {row.get('_id')}"


def _to_document(collection: str, row: Row, source: str, names: Sequence[str]) -> Document | BadRecord:
    text = next((row[name] for name in names if row.get(name) is not None), None)
    if isinstance(text, str):
        return Document(text, source, format_place(collection, row))
    found = [name for name in row if name not in ("_id", "idx")]
    reason = f"no text in {' or '.join(names)}; found {found}; set corpus.text_key"
    return BadRecord(source, format_place(collection, row), reason[:RAW_BYTES], _raw(row))


def _raw(row: Row) -> bytes:
    """The start of a document, for the quarantine."""
    return json.dumps(row, default=str, ensure_ascii=False).encode(errors="backslashreplace")[:RAW_BYTES]
