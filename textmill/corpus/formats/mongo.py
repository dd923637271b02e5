"""Read MongoDB collections as one source: `mongo:db_config.json`.

The positions of the collections web (idx 0 to 2, of which 1 was deleted) and books (idx 0 and 1), in the order of
COLLECTIONS; they depend on idx alone, so deleting a document moves no other:

    position   0      1     2      3        4
    document   web 0  none  web 2  books 0  books 1

The server may be unreachable for a while: `MongoServer` repeats requests. Its connection string is secret, and parts of
it are in pymongo's messages: only the kind of an error is printed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import BadRecord
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.split import split_from_name
from textmill.corpus.text_fields import parse_text_key
from textmill.errors import TextmillError, warn
from textmill.storage.files import hash_json, read_json

try:
    import pymongo
    from pymongo.errors import ConnectionFailure, CursorNotFound, PyMongoError
except ImportError:
    raise TextmillError("a MongoDB corpus needs pymongo; run: pip install 'textmill[mongo]'") from None

DOCUMENTS_PER_CHUNK = 100_000
"""Positions in a chunk."""
SCAN_BLOCK = 1000
"""Positions in one query."""
PROBES = 16
"""Documents of each collection in the fingerprint, besides the first and the last."""
TEXT_FIELDS = ("filt_text", "form", "text")
"""The fields that may hold the text, cleaned or original; the first present one is read."""
HAS_IDX = {"idx": {"$gte": 0}}
"""The condition that a document has an idx."""
CONNECTION_VARIABLE = "TEXTMILL_MONGO"
MAX_OUTAGE = 120.0
"""Seconds that a server may be unreachable before the command fails."""
FIRST_DELAY = 0.25
MAX_DELAY = 8.0
"""Seconds between two attempts; the delay doubles each time."""
TIMEOUTS = {"serverSelectionTimeoutMS": 5_000, "socketTimeoutMS": 300_000}
"""Defaults for the connection string; a server that never answers must not block the command."""
Response = TypeVar("Response")
Row = dict[str, Any]
"""A MongoDB document."""


class CollectionRange(NamedTuple):
    """The positions of a collection: a document is at `first` + its idx."""

    collection: str
    first: int
    size: int


def find(entry: str) -> list[Source]:
    """The source of a `mongo:` entry; warns of a collection that is slow to read."""
    address = os.path.expanduser(entry.removeprefix("mongo:"))
    server = open_server(address)
    check_collections(server)
    collection_ranges: list[CollectionRange] = []
    first = 0
    for name in server.collections:
        size = server.request(_next_idx, name)
        collection_ranges.append(CollectionRange(name, first, size))
        first += size
        if not server.request(_has_idx_index, name):
            advice = f"create one in mongosh: db.getCollection('{name}').createIndex({{idx: 1}}, {{unique: true}})"
            warn(f"{address}: {name}: no index on idx, so reading is slow; {advice}")
    server.close()
    pooled = [name for name in server.collections if split_from_name(name) in ("valid", "test")]
    if pooled and split_from_name(os.path.basename(address)) is None:
        warn(
            f"{address}: the collections of one file are one source, which corpus.split divides; {', '.join(pooled)} "
            "may be evaluation data: name train and such collections in files of their own, mongo:train.json and "
            "mongo:test.json"
        )
    return [Source(entry, address, "mongo", snapshot=tuple(collection_ranges))]


def _next_idx(db: Any, collection: str) -> int:
    """The highest idx of a collection plus one; 0 for an empty collection."""
    last = db[collection].find_one(HAS_IDX, {"idx": 1}, sort=[("idx", -1)])
    return int(last["idx"]) + 1 if last else 0


def ranges(source: Source, document_unit: str, chunk_bytes: int) -> Iterator[ChunkRange]:
    """Ranges of positions."""
    size = _count_positions(source)
    for start in range(0, max(size, 1), DOCUMENTS_PER_CHUNK):
        yield start, min(start + DOCUMENTS_PER_CHUNK, size), start


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the documents at a range of positions, each with its collection, idx and _id as its place."""
    source = chunk.source
    server = _keep_connected(open_server(source.address), os.getpid())
    fields = parse_text_key(source, config)
    for one in source.snapshot if chunk.start == 0 else ():
        for document in server.request(_fetch_without_idx, one.collection):
            reason = "no idx, the number by which documents are read; give it one"
            yield BadRecord(source.name, f"{one.collection} None {document['_id']}", reason, b"")
    for collection, row in _scan(server, source.snapshot, chunk.start, chunk.stop):
        place = f"{collection} {row.pop('idx')} {row.pop('_id')}"
        name = next((name for name in TEXT_FIELDS if row.get(name) is not None), None)
        if name and fields.key == "text" and not config.chat:
            row["text"] = row[name]
        yield from fields.documents(row, place)


@lru_cache(maxsize=4)
def _keep_connected(server: MongoServer, pid: int) -> MongoServer:
    """The first equal server of this process, so that all chunks share its connection.

    The process id is part of the cache's key: a forked child must not use its parent's connection.
    """
    return server


def _scan(
    server: MongoServer, collection_ranges: Sequence[CollectionRange], start: int, stop: int
) -> Iterator[tuple[str, Row]]:
    """Yield (collection, document) for positions start to stop, in order.

    After an outage an entire query is repeated, so no document is lost or read twice.
    """
    for collection, first, size in collection_ranges:
        high = min(stop - first, size)
        for low in range(max(start - first, 0), high, SCAN_BLOCK):
            for row in server.request(_fetch, collection, low, min(low + SCAN_BLOCK, high)):
                yield collection, row


def _fetch(db: Any, collection: str, low: int, high: int) -> list[Row]:
    """The documents with these idx, in order."""
    rows = list(db[collection].find({"idx": {"$gte": low, "$lt": high}}, batch_size=SCAN_BLOCK))
    return sorted(rows, key=lambda row: (row["idx"], str(row["_id"])))


def _fetch_without_idx(db: Any, collection: str) -> list[Row]:
    """The _id of the documents that have no idx, in order."""
    rows = list(db[collection].find({"idx": {"$not": {"$gte": 0}}}, {"_id": 1}))
    return sorted(rows, key=lambda row: str(row["_id"]))


def state(source: Source) -> tuple[int, str]:
    """The number of positions, and a hash of each collection's size, number of documents and a few of them.

    Documents added after the snapshot do not change it.
    """
    server = open_server(source.address)
    try:
        probes = [server.request(_probe, one.collection, one.size) for one in source.snapshot]
    finally:
        server.close()
    rows = [[one.collection, one.size, *probe] for one, probe in zip(source.snapshot, probes, strict=True)]
    return _count_positions(source), hash_json(rows)


def _count_positions(source: Source) -> int:
    return sum(one.size for one in source.snapshot)


def _probe(db: Any, name: str, size: int) -> tuple[int, int, list[str]]:
    """The number of documents of a range, that of documents without idx, and some of the range, spread evenly from the
    first to the last."""
    gaps = PROBES + 1
    probed_idx = sorted({(size - 1) * number // gaps for number in range(gaps + 1)}) if size else []
    in_range = db[name].count_documents({"idx": {"$gte": 0, "$lt": size}})
    without_idx = db[name].estimated_document_count() - db[name].count_documents(HAS_IDX)
    rows = list(db[name].find({"idx": {"$in": probed_idx}}))
    return in_range, without_idx, sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)


def _has_idx_index(db: Any, name: str) -> bool:
    """True if a collection has an index that starts with idx."""
    return any(index["key"][0][0] == "idx" for index in db[name].index_information().values())


@dataclass(frozen=True)
class MongoServer:
    """One database of a server, with the collections of a db_config.json."""

    path: Path
    database: str
    collections: tuple[str, ...]
    address: str = field(repr=False)
    """The connection string; it is secret, so it is never written or printed."""

    @cached_property
    def db(self) -> Any:
        """The database connection; each process must open its own."""
        options: dict[str, Any] = {
            name: value for name, value in TIMEOUTS.items() if name.lower() not in self.address.lower()
        }
        try:
            return pymongo.MongoClient(self.address, appname="textmill", **options)[self.database]
        except (PyMongoError, ValueError) as error:
            raise TextmillError(
                f"{self.path}: cannot connect to MongoDB ({_kind_of(error)}); fix the connection string, in which "
                "special characters of a name or password are percent-encoded"
            ) from None

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        if "db" in self.__dict__:
            self.__dict__.pop("db").client.close()

    def request(self, operation: Callable[..., Response], *arguments: Any) -> Response:
        """Call `operation(db, *arguments)`, which is idempotent; retry while the server is unreachable."""
        started = time.monotonic()
        delay = FIRST_DELAY
        while True:
            try:
                return operation(self.db, *arguments)
            except (ConnectionFailure, CursorNotFound) as error:
                reason = _kind_of(error)
                outage = time.monotonic() - started
                if outage > MAX_OUTAGE:
                    raise TextmillError(
                        f"{self.path}: no MongoDB server for {outage:.0f} s ({reason}); "
                        f"start it and run the command again"
                    ) from None
                if delay == FIRST_DELAY:
                    warn(f"{self.path}: the MongoDB server does not answer ({reason}); retrying for {MAX_OUTAGE:g} s")
                time.sleep(delay)
                delay = min(2 * delay, MAX_DELAY)
            except PyMongoError as error:
                raise TextmillError(f"{self.path}: MongoDB error: {_kind_of(error)}") from None


def _kind_of(error: Exception) -> str:
    """The name of an error, and what the server calls it."""
    code_name = (getattr(error, "details", None) or {}).get("codeName")
    return f"{type(error).__name__}: {code_name}" if code_name else type(error).__name__


def open_server(path: str | Path) -> MongoServer:
    """The server of a db_config.json; does not connect yet."""
    path = Path(path)
    settings = read_json(path)
    if not isinstance(settings, dict):
        raise TextmillError(
            f"{path}: expected an object with MONGO_CONNECTION_DB and COLLECTIONS; found a {type(settings).__name__}"
        )
    database = settings.get("MONGO_CONNECTION_DB")
    names = settings.get("COLLECTIONS")
    if not isinstance(database, str) or not database:
        raise TextmillError(f"{path}: MONGO_CONNECTION_DB is missing; set the name of the database")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise TextmillError(f"{path}: COLLECTIONS must be a list of names; list at least one collection")
    if len(set(names)) < len(names):
        raise TextmillError(f"{path}: COLLECTIONS lists a collection twice; keep one")
    return MongoServer(path, database, tuple(names), _connection_string(path, settings))


def check_collections(server: MongoServer) -> None:
    """Raise an error for a collection that the database does not have."""
    existing = server.request(lambda db: db.list_collection_names())
    for name in server.collections:
        if name not in existing:
            raise TextmillError(
                f"{server.path}: COLLECTIONS: no collection '{name}'; the database holds "
                f"{', '.join(sorted(existing)) or 'none'}"
            )


def _connection_string(path: Path, settings: dict[str, Any]) -> str:
    """The environment variable's, else the secret file's, else that of db_config.json."""
    if address := os.environ.get(CONNECTION_VARIABLE):
        return address
    address = settings.get("MONGO_CONNECTION_STRING")
    secret_file = settings.get("MONGO_CONNECTION_FILE")
    if isinstance(secret_file, str) and secret_file:
        try:
            address = (path.parent / os.path.expanduser(secret_file)).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise TextmillError(
                f"{path}: MONGO_CONNECTION_FILE: {secret_file}: not readable ({type(error).__name__})"
            ) from None
    if not isinstance(address, str) or not address:
        raise TextmillError(
            f"{path}: no connection string; set the environment variable {CONNECTION_VARIABLE}, "
            f"or MONGO_CONNECTION_FILE or MONGO_CONNECTION_STRING in the file"
        )
    return address
