"""Read MongoDB collections as one lazy sequence, by position or in order, with prefetch.

The collections web (idx 0 to 2, of which 1 was deleted) and books (idx 0 and 1), in the order of COLLECTIONS:

    position   0      1     2      3        4
    document   web 0  None  web 2  books 0  books 1
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, overload

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.mongo.server import MongoServer, check_collections, open_server
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
    server = _keep_connected(open_server(path), os.getpid())
    index = MongoIndex(server, find_collection_ranges(server) if collection_ranges is None else collection_ranges)
    source = f"mongo:{path}"
    key = text_key or config.text_key
    text_fields = text_field_names(key, read_original=config.mongo_write_back)
    conversations = None
    if config.chat:
        conversations = TextFields(
            source, key, list_paths=(), text_paths=(), join=None, kept_fields=(), chat=config.chat
        )
    try:
        for collection, row in index.scan(start, stop):
            place = format_place(collection, row)
            if conversations is None:
                yield _to_document(row, source, place, text_fields)
            else:
                yield from conversations.documents(_without_keys(row), place, _raw(row))
    finally:
        index.stop_prefetch()


@lru_cache(maxsize=4)
def _keep_connected(server: MongoServer, pid: int) -> MongoServer:
    """The first equal server of this process, so that all ranges share its connection.

    The process id is part of the cache's key: a forked child must not use its parent's connection.
    """
    return server


def format_place(collection: str, row: Row) -> str:
    """A document's place: its collection, idx and _id."""
    return f"{collection} {row.get('idx')} {row.get('_id')}"


def _to_document(row: Row, source: str, place: str, text_fields: Sequence[str]) -> Document | BadRecord:
    """The document with the text of the first field that is present."""
    text = next((row[name] for name in text_fields if row.get(name) is not None), None)
    if isinstance(text, str):
        return Document(text, source, place)
    reason = f"no text in {' or '.join(text_fields)}; found {list(_without_keys(row))}; set corpus.text_key"
    return BadRecord(source, place, reason[:RAW_BYTES], _raw(row))


def _without_keys(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("_id", "idx")}


def _raw(row: Row) -> bytes:
    """The start of a document, for the quarantine."""
    return json.dumps(row, default=str, ensure_ascii=False).encode(errors="backslashreplace")[:RAW_BYTES]


@dataclass
class QuerySize:
    """Chooses how many positions one query holds.

    Many suit a slow network. Few suit a server that compares each document with the whole list. The sizes are tried in
    ascending order, a batch each, until one is slower: rates of 500, 900 and 700 for 24, 96 and 384 settle on 96.
    """

    size: int = QUERY_SIZES[0]
    rates: dict[int, float] = field(default_factory=dict)
    """Documents per second with each size that was tried."""
    is_settled: bool = False
    batches: int = 0

    def learn(self, rate: float) -> None:
        """Record the rate of a batch with the current size; choose the size of the next batch."""
        self.batches += 1
        if self.batches % RELEARN_BATCHES == 0:
            self.size = QUERY_SIZES[0]
            self.rates = {}
            self.is_settled = False
        elif not self.is_settled:
            self.rates[self.size] = rate
            fastest = max(self.rates, key=lambda size: self.rates[size])
            untried = [size for size in QUERY_SIZES if size not in self.rates]
            self.is_settled = fastest != self.size or not untried
            self.size = fastest if self.is_settled else untried[0]


class Query(NamedTuple):
    """A query for documents of one collection."""

    collection: str
    idx: dict[str, Any]
    """The condition on idx: {"$in": [3, 17]} or {"$gte": 0, "$lt": 1000}."""


class MongoIndex:
    """A lazy sequence over the collections, in the order of COLLECTIONS; None for a position without a document."""

    def __init__(self, server: MongoServer, collection_ranges: Sequence[CollectionRange]) -> None:
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
        first_positions = {collection: first for collection, first, _ in self.collection_ranges}
        found: dict[int, Row] = {}
        for collection, row in self.scan(positions.start, positions.stop):
            found.setdefault(first_positions[collection] + int(row["idx"]), row)
        return [found.get(number) for number in positions]

    def __iter__(self) -> Iterator[Row]:
        """Every document in order; positions without a document are skipped."""
        return (row for _, row in self.scan())

    def batch(self, positions: Sequence[int]) -> list[Row | None]:
        """The documents at any positions, in the given order, with a few queries per collection."""
        locations = [self._locate(position) for position in positions]
        started = perf_counter()
        found: dict[tuple[str, int], Row] = {}
        for collection, rows in self._prefetch(self._batch_queries(locations)):
            for row in rows:
                found.setdefault((collection, int(row["idx"])), row)
        if len(positions) >= MIN_MEASURED_BATCH:
            self.query_size.learn(len(found) / (perf_counter() - started))
        return [found.get(location) for location in locations]

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, Row]]:
        """Yield (collection, document) for positions start to stop, in order; later blocks are prefetched."""
        end = len(self) if stop is None else min(stop, len(self))
        for collection, rows in self._prefetch(self._scan_queries(start, end)):
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
        """The collection and the idx of a position; -1 is the last position."""
        positive = position + len(self) if position < 0 else position
        for collection, first, size in self.collection_ranges:
            if first <= positive < first + size:
                return collection, positive - first
        raise IndexError(f"position {position} is out of range; the index has {len(self):,}")

    def _batch_queries(self, locations: Iterable[tuple[str, int]]) -> Iterator[Query]:
        """Queries for the documents with these (collection, idx), each idx once."""
        idx_by_collection: dict[str, set[int]] = {}
        for collection, idx in locations:
            idx_by_collection.setdefault(collection, set()).add(idx)
        size = self.query_size.size
        for collection, idx_set in idx_by_collection.items():
            ordered = sorted(idx_set)
            for start in range(0, len(ordered), size):
                yield Query(collection, {"$in": ordered[start : start + size]})

    def _scan_queries(self, start: int, stop: int) -> Iterator[Query]:
        """Queries for all documents at positions start to stop."""
        for collection, first, size in self.collection_ranges:
            low = max(start - first, 0)
            high = min(stop - first, size)
            for block_start in range(low, high, SCAN_BLOCK):
                yield Query(collection, {"$gte": block_start, "$lt": min(block_start + SCAN_BLOCK, high)})

    def _prefetch(self, queries: Iterator[Query]) -> Iterator[tuple[str, list[Row]]]:
        """Yield (collection, documents) of each query, in order, with PREFETCH queries in flight."""
        in_flight: deque[tuple[str, Future[list[Row]]]] = deque()

        def submit(query: Query) -> None:
            in_flight.append((query.collection, self._threads.submit(self._fetch, query)))

        try:
            for query in islice(queries, PREFETCH):
                submit(query)
            while in_flight:
                collection, future = in_flight.popleft()
                rows = future.result()
                if (next_query := next(queries, None)) is not None:
                    submit(next_query)
                yield collection, rows
        finally:
            for _, future in in_flight:
                future.cancel()

    def _fetch(self, query: Query) -> list[Row]:
        """The documents of a query, in the order of idx.

        After an outage the entire query is repeated, so no document is lost or read twice.
        """
        condition = {"idx": query.idx}
        rows = self.server.request(lambda db: list(db[query.collection].find(condition, batch_size=SCAN_BLOCK)))
        return sorted(rows, key=lambda row: (row["idx"], str(row["_id"])))
