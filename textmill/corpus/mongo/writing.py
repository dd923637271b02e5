"""Write to MongoDB: cleaned text into existing documents, and new documents into a collection."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from textmill.corpus.document import Document
from textmill.corpus.mongo.server import META_COLLECTION, Server, check_collections, open_server
from textmill.corpus.mongo.snapshot import CLEANED_FIELD, INDEX_ADVICE, has_idx_index, next_idx
from textmill.errors import TextmillError
from textmill.storage.files import hash_file

WRITE_BLOCK = 1000
"""Documents per write."""
DUPLICATE_KEY = 11000
"""The server's error code for an idx that exists already."""


def create_idx_indexes(path: str | Path) -> None:
    """Create the index on idx in every collection; without it, each read scans all documents."""
    server = open_server(path)
    check_collections(server)
    for name in server.collections:
        _ensure_idx_index(server, name)


def fix_meta_info(path: str | Path) -> dict[str, int]:
    """Correct num_docs in meta_info for every collection; return the counts."""
    server = open_server(path)
    check_collections(server)
    return {name: update_document_count(server, name) for name in server.collections}


def check_writable(server: Server) -> None:
    """Raise an error for a collection that does not exist or has no index on idx."""
    check_collections(server)
    for name in server.collections:
        if not has_idx_index(server, name):
            raise TextmillError(f"{server.path}: {name}: no index on idx; {INDEX_ADVICE}('{server.path}')")


def write_back(path: str | Path, documents: Iterable[Document]) -> dict[str, int]:
    """Write the text of documents into `filt_text` of the MongoDB documents they were read from; idempotent."""
    server = open_server(path)
    check_writable(server)
    return write_texts(server, ((*parse_place(server, document.id), document.text) for document in documents))


def write_texts(server: Server, texts: Iterable[tuple[str, int, str]]) -> dict[str, int]:
    """Set `filt_text` for each (collection, idx, text); return the numbers of documents, changed and missing ones."""
    counts = {"documents": 0, "changed": 0, "missing": 0}
    for block in _blocks(texts):
        changes: dict[str, list[Any]] = {}
        for name, idx, text in block:
            changes.setdefault(name, []).append(UpdateOne({"idx": idx}, {"$set": {CLEANED_FIELD: text}}))
        for name, updates in changes.items():
            done = server.request(partial(_bulk_write, collection=name, updates=updates))
            counts["documents"] += len(updates)
            counts["changed"] += done.modified_count
            counts["missing"] += len(updates) - done.matched_count
    return counts


def _bulk_write(db: Any, collection: str, updates: list[Any]) -> Any:
    return db[collection].bulk_write(updates, ordered=False)


def load_lines(
    path: str | Path, collection: str, files: Sequence[str | Path], field: str = "form", text_key: str = "text"
) -> dict[str, int]:
    """Load JSON lines into a collection, with the text in `field`, starting at the next free idx.

    A file that was loaded before, even partly, is not loaded twice.
    """
    server = open_server(path)
    ensure_loadable(server, collection)
    counts = {"records": 0, "loaded": 0, "existing": 0, "bad": 0}
    for file in map(Path, files):
        records, texts = _count_lines(file, text_key)
        load_record = {"sha256": hash_file(file), "field": field, "text_key": text_key, "documents": texts}
        first = reserve_idx_range(server, collection, load_record)
        counts["records"] += records
        counts["bad"] += records - texts
        new = insert_rows(server, collection, ({field: text} for text in _texts(file, text_key)), first, field)
        counts["loaded"] += new
        counts["existing"] += texts - new
    update_document_count(server, collection)
    return counts


def ensure_loadable(server: Server, collection: str) -> None:
    """Raise an error for a collection that db_config.json does not list; otherwise create its index on idx."""
    if collection not in server.collections:
        raise TextmillError(
            f"{server.path}: COLLECTIONS does not list '{collection}'; "
            f"add it, or choose one of {', '.join(server.collections)}"
        )
    _ensure_idx_index(server, collection)


def insert_rows(server: Server, collection: str, rows: Iterable[dict[str, Any]], first: int, field: str) -> int:
    """Insert documents with idx `first`, `first` + 1 ...; skip existing ones; return how many were new."""
    numbered = ({"idx": first + number, **row} for number, row in enumerate(rows))
    return sum(
        server.request(partial(_insert, collection=collection, rows=block, field=field)) for block in _blocks(numbered)
    )


def _insert(db: Any, collection: str, rows: list[dict[str, Any]], field: str) -> int:
    """Insert the missing documents; some exist already after a kill or a lost response."""
    try:
        return len(db[collection].insert_many([dict(row) for row in rows], ordered=False).inserted_ids)
    except BulkWriteError as error:
        if any(write_error.get("code") != DUPLICATE_KEY for write_error in error.details.get("writeErrors", [])):
            raise
        _check_own_documents(db[collection], rows, field)
        return int(error.details.get("nInserted", 0))


def _check_own_documents(collection: Any, rows: list[dict[str, Any]], field: str) -> None:
    """Raise an error if a reserved idx holds a document that another program wrote."""
    wanted = {row["idx"]: row[field] for row in rows}
    idx_range = {"idx": {"$gte": min(wanted), "$lte": max(wanted)}}
    for row in collection.find(idx_range, {"_id": 0, "idx": 1, field: 1}):
        if row.get(field) != wanted.get(row["idx"]):
            raise TextmillError(
                f"{collection.name}: idx {row['idx']} holds a different document; "
                f"another program writes to this collection; load into another one"
            )


def reserve_idx_range(server: Server, collection: str, load: dict[str, Any]) -> int:
    """Reserve a range of idx for a file's documents and return its start; a repeated load gets its earlier range."""
    server.request(
        lambda db: db[META_COLLECTION].update_one(
            {"collection_name": collection}, {"$setOnInsert": {"num_docs": 0}}, upsert=True
        )
    )
    while True:
        meta = server.request(lambda db: db[META_COLLECTION].find_one({"collection_name": collection}))
        for earlier in meta.get("loads", []):
            if load.items() <= earlier.items():
                return int(earlier["first"])
        first = max(server.request(partial(next_idx, collection=collection)), int(meta.get("next_idx", 0)))
        # Another loader may run at the same time: the range is ours only if next_idx has not changed.
        selector = {"collection_name": collection, "next_idx": meta.get("next_idx", {"$exists": False})}
        change = {"$set": {"next_idx": first + load["documents"]}, "$push": {"loads": {**load, "first": first}}}
        # A lost response does no harm: the next round finds the load by its checksum.
        server.request(partial(_update_meta, selector=selector, change=change))


def _update_meta(db: Any, selector: dict[str, Any], change: dict[str, Any]) -> None:
    db[META_COLLECTION].update_one(selector, change)


def _ensure_idx_index(server: Server, collection: str) -> None:
    if not has_idx_index(server, collection):
        try:
            server.request(lambda db: db[collection].create_index("idx", unique=True))
        except TextmillError as error:
            raise TextmillError(
                f"{collection}: cannot create an index on idx ({error}); two documents may have the same idx"
            ) from None


def update_document_count(server: Server, collection: str) -> int:
    """Count a collection and store the number as num_docs in meta_info."""
    count: int = server.request(lambda db: db[collection].count_documents({}))
    server.request(
        lambda db: db[META_COLLECTION].update_one(
            {"collection_name": collection}, {"$set": {"num_docs": count}}, upsert=True
        )
    )
    return count


def parse_place(server: Server, place: str) -> tuple[str, int]:
    """The collection and idx in a document's id."""
    for name in server.collections:
        idx = place.removeprefix(name + " ").partition(" ")[0]
        if place.startswith(name + " ") and idx.isdigit():
            return name, int(idx)
    raise TextmillError(
        f"'{place}': not a document of {server.path}; its collections are {', '.join(server.collections)}"
    )


def _blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    stream = iter(rows)
    while block := list(islice(stream, WRITE_BLOCK)):
        yield block


def _count_lines(file: Path, text_key: str) -> tuple[int, int]:
    """The number of records, and of records with a text."""
    try:
        with open(file, "rb") as stream:
            records = sum(1 for line in stream if line.strip())
    except OSError as error:
        raise TextmillError(f"{file}: not readable ({error.strerror})") from None
    return records, sum(1 for _ in _texts(file, text_key))


def _texts(file: Path, text_key: str) -> Iterator[str]:
    with open(file, "rb") as stream:
        for line in stream:
            try:
                text = json.loads(line).get(text_key)
                if isinstance(text, str) and text.encode():
                    yield text
            except (ValueError, AttributeError, RecursionError):
                continue  # counted as bad, like a text that cannot be encoded
