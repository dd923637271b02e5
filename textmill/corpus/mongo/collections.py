"""MongoDB collections as one index: any document by its position, or all of them in order, lazily and ahead of need."""

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
from textmill.corpus.mongo.snapshot import Row, Stretch, bounds_of, notes_on, text_fields
from textmill.corpus.records import RAW, Bad
from textmill.corpus.text_fields import Fields
from textmill.errors import warn

BLOCK = 1000
"""Positions that a scan asks for at a time."""
AHEAD = 3
"""Questions under way while the caller works."""
PORTIONS = (24, 96, 384, 1536)
"""Positions of one `$in`, from which every index finds the best for its server."""
TELLING = 256
"""Positions of a batch that is long enough to learn from."""
LEARNT = 500
"""Batches after which the best portion is sought anew."""


def open_index(path: str | Path, bounds: Sequence[Stretch] | None = None) -> MongoIndex:
    """The collections of a db_config.json as one index; what is odd about them is said, once."""
    server = open_server(path)
    if bounds is None:
        check_collections(server)
        bounds = bounds_of(server)
        for note in notes_on(server, bounds):
            warn(f"{path}: {note}")
    return MongoIndex(server, bounds)


def read_range(
    path: str | Path,
    start: int,
    stop: int,
    config: CorpusConfig,
    bounds: Sequence[Stretch] | None = None,
    text_key: str | None = None,
) -> Iterator[Document | Bad]:
    """The documents at positions start to stop, in order; `bounds` of the first look keeps the positions when collections grow."""
    server = _shared(open_server(path), os.getpid())
    index = MongoIndex(server, bounds_of(server) if bounds is None else bounds)
    key, source = text_key or config.text_key, f"mongo:{path}"
    names = text_fields(key, raw=config.mongo_write_back)
    talks = Fields(source, key, (), (), None, (), chat=config.chat) if config.chat else None
    try:
        for collection, row in index.scan(start, stop):
            if talks is None:
                yield _document_of(collection, row, source, names)
            else:
                said = {name: value for name, value in row.items() if name not in ("_id", "idx")}
                yield from talks.documents(said, place_of(collection, row), _raw(row))
    finally:
        index.rest()


@lru_cache(maxsize=4)
def _shared(server: Server, pid: int) -> Server:
    """One connection a process, for all its ranges: a client must not be taken into a child."""
    return server


@dataclass
class Portion:
    """How many positions one question holds: many where the way is long, few where the server searches the list for each document."""

    size: int = PORTIONS[0]
    rates: dict[int, float] = field(default_factory=dict)
    batches: int = 0

    def learn(self, rate: float) -> None:
        """Note the documents a second of a batch; go to the next size as long as that helps."""
        self.batches += 1
        if self.batches % LEARNT == 0:
            self.size, self.rates = PORTIONS[0], {}
        elif len(self.rates) < len(PORTIONS):
            self.rates[self.size] = rate
            best = max(self.rates, key=lambda size: self.rates[size])
            untried = [size for size in PORTIONS if size not in self.rates]
            if best == self.size and untried:
                self.size = untried[0]
            else:
                self.size = best
                self.rates |= dict.fromkeys(untried, 0.0)


class MongoIndex:
    """A lazy sequence over the collections in the order of COLLECTIONS; a position without a document gives None."""

    def __init__(self, server: Server, bounds: Sequence[Stretch]) -> None:
        self.server, self.bounds, self.portion = server, tuple(bounds), Portion()
        self._threads = ThreadPoolExecutor(AHEAD, thread_name_prefix="mongo")

    def __repr__(self) -> str:
        return f"MongoIndex({self.server.path}: {len(self):,} positions in {len(self.bounds)} collections)"

    def __len__(self) -> int:
        return sum(one.size for one in self.bounds)

    @overload
    def __getitem__(self, place: int) -> Row | None: ...
    @overload
    def __getitem__(self, place: slice) -> list[Row | None]: ...
    def __getitem__(self, place: int | slice) -> Row | list[Row | None] | None:
        """The document at a position, or those of a slice."""
        if isinstance(place, int):
            return self.batch([place])[0]
        positions = range(*place.indices(len(self)))
        if positions.step != 1:
            return self.batch(positions)
        rows: list[Row | None] = [None] * len(positions)
        firsts = {one.collection: one.first for one in self.bounds}
        for collection, row in self.scan(positions.start, positions.stop):
            at = firsts[collection] + int(row["idx"]) - positions.start
            rows[at] = rows[at] or row
        return rows

    def __iter__(self) -> Iterator[Row]:
        """Every document in order; positions without one are passed over."""
        return (row for _, row in self.scan())

    def batch(self, positions: Sequence[int]) -> list[Row | None]:
        """The documents at any positions, in the order asked; a few questions for each collection."""
        wanted: dict[str, set[int]] = {}
        places = [self._place(position) for position in positions]
        for collection, idx in places:
            wanted.setdefault(collection, set()).add(idx)
        parts, size, begin = [], self.portion.size, perf_counter()
        for collection, numbers in wanted.items():
            ordered = sorted(numbers)
            parts += [(collection, {"$in": ordered[at : at + size]}) for at in range(0, len(ordered), size)]
        found: dict[tuple[str, int], Row] = {}
        for (collection, _), rows in zip(parts, self._ahead(parts), strict=True):
            for row in rows:
                found.setdefault((collection, int(row["idx"])), row)
        if len(positions) >= TELLING:
            self.portion.learn(len(found) / (perf_counter() - begin))
        return [found.get(place) for place in places]

    def scan(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[str, Row]]:
        """(collection, document) at positions start to stop, in order; the next blocks are fetched meanwhile."""
        parts = list(self._blocks(start, len(self) if stop is None else min(stop, len(self))))
        for (collection, _), rows in zip(parts, self._ahead(parts), strict=True):
            for row in rows:
                yield collection, row

    def rest(self) -> None:
        """End the threads that fetch ahead."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Let the connection go."""
        self.rest()
        self.server.close()

    def _place(self, position: int) -> tuple[str, int]:
        at = position + len(self) if position < 0 else position
        for one in self.bounds:
            if one.first <= at < one.first + one.size:
                return one.collection, at - one.first
        raise IndexError(f"position {position} of {len(self):,}")

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[str, Row]]:
        for one in self.bounds:
            low, high = max(start - one.first, 0), min(stop - one.first, one.size)
            for at in range(low, high, BLOCK):
                yield one.collection, {"$gte": at, "$lt": min(at + BLOCK, high)}

    def _ahead(self, parts: Sequence[tuple[str, Row]]) -> Iterator[list[Row]]:
        """The answers to all parts in order, AHEAD of them under way."""
        waiting: deque[Future[list[Row]]] = deque()
        todo = iter(parts)
        try:
            for part in islice(todo, AHEAD):
                waiting.append(self._threads.submit(self._fetch, *part))
            while waiting:
                rows = waiting.popleft().result()
                if (part_next := next(todo, None)) is not None:
                    waiting.append(self._threads.submit(self._fetch, *part_next))
                yield rows
        finally:
            for future in waiting:
                future.cancel()

    def _fetch(self, collection: str, idx: Row) -> list[Row]:
        # Handed on only when whole: after an outage the block is asked for anew, and nothing of it was seen before.
        rows = self.server.ask(lambda db: list(db[collection].find({"idx": idx}, batch_size=BLOCK)))
        return sorted(rows, key=lambda row: (row["idx"], str(row["_id"])))


def place_of(collection: str, row: Row) -> str:
    """The way back: the collection, idx and _id of a document."""
    return f"{collection} {row.get('idx')} {row.get('_id')}"


def _document_of(collection: str, row: Row, source: str, names: Sequence[str]) -> Document | Bad:
    text = next((row[name] for name in names if row.get(name) is not None), None)
    if isinstance(text, str):
        return Document(text, source, place_of(collection, row))
    found = [name for name in row if name not in ("_id", "idx")]
    reason = f"no text in {' or '.join(names)}; found {found}; set corpus.text_key"
    return Bad(source, place_of(collection, row), reason[:RAW], _raw(row))


def _raw(row: Row) -> bytes:
    """The beginning of a document, to be looked at."""
    return json.dumps(row, default=str, ensure_ascii=False).encode(errors="backslashreplace")[:RAW]
