"""Writing to MongoDB: cleaned text back to its documents, new documents into a collection, and the order that reading needs."""

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
from textmill.corpus.mongo.snapshot import CLEANED_FIELD, INDEX_ADVICE, has_idx_index
from textmill.errors import TextmillError
from textmill.storage.files import hash_file

WRITE_BLOCK = 1000
"""Documents of one write."""
DUPLICATE_KEY = 11000
"""The server's code for an idx that is there already."""


def create_idx_indexes(path: str | Path) -> None:
    """Make the index on idx in every collection; without it each read looks at all documents."""
    server = open_server(path)
    check_collections(server)
    for name in server.collections:
        _ensure_idx_index(server, name)


def fix_meta_info(path: str | Path) -> dict[str, int]:
    """Count every collection, set num_docs of meta_info right, and give the counts."""
    server = open_server(path)
    check_collections(server)
    return {name: update_document_count(server, name) for name in server.collections}


def check_writable(server: Server) -> None:
    """Refuse a collection that is not there, or cannot be searched by idx."""
    check_collections(server)
    for name in server.collections:
        if not has_idx_index(server, name):
            raise TextmillError(f"{server.path}: {name}: no index on idx; {INDEX_ADVICE}('{server.path}')")


def write_back(path: str | Path, documents: Iterable[Document]) -> dict[str, int]:
    """Put the text of documents that were read from here into their `filt_text`; done twice, it changes nothing more."""
    server = open_server(path)
    check_writable(server)
    return write_texts(server, ((*parse_place(server, document.id), document.text) for document in documents))


def write_texts(server: Server, texts: Iterable[tuple[str, int, str]]) -> dict[str, int]:
    """Set `filt_text` of documents by (collection, idx, text); how many were named, changed, and not there."""
    counts = {"documents": 0, "changed": 0, "missing": 0}
    for block in _blocks(texts):
        changes: dict[str, list[Any]] = {}
        for name, idx, text in block:
            changes.setdefault(name, []).append(UpdateOne({"idx": idx}, {"$set": {CLEANED_FIELD: text}}))
        for name, updates in changes.items():
            done = server.request(lambda db, name=name, updates=updates: db[name].bulk_write(updates, ordered=False))  # type: ignore[misc]
            counts["documents"] += len(updates)
            counts["changed"] += done.modified_count
            counts["missing"] += len(updates) - done.matched_count
    return counts


def load_lines(
    path: str | Path, collection: str, files: Sequence[str | Path], field: str = "form", text_key: str = "text"
) -> dict[str, int]:
    """Load JSON lines, their text as `field`, at the next free idx; a file that is loaded already, or in part, is not doubled."""
    server = open_server(path)
    ensure_loadable(server, collection)
    counts = {"records": 0, "loaded": 0, "there": 0, "bad": 0}
    for file in map(Path, files):
        records, texts = _count_lines(file, text_key)
        load_record = {"sha256": hash_file(file), "field": field, "text_key": text_key, "documents": texts}
        first = reserve_idx_range(server, collection, load_record)
        counts["records"] += records
        counts["bad"] += records - texts
        new = insert_rows(server, collection, ({field: text} for text in _texts(file, text_key)), first, field)
        counts["loaded"] += new
        counts["there"] += texts - new
    update_document_count(server, collection)
    return counts


def ensure_loadable(server: Server, collection: str) -> None:
    """Refuse a collection that the db_config.json does not name; one that it does gets its index on idx."""
    if collection not in server.collections:
        raise TextmillError(
            f"{server.path}: COLLECTIONS does not name '{collection}'; add it there, or choose one of {', '.join(server.collections)}"
        )
    _ensure_idx_index(server, collection)


def insert_rows(server: Server, collection: str, rows: Iterable[dict[str, Any]], first: int, field: str) -> int:
    """Insert documents at idx `first` and on, but for those that are there; how many were new."""
    numbered = ({"idx": first + number, **row} for number, row in enumerate(rows))
    return sum(
        server.request(partial(_insert, collection=collection, rows=block, field=field)) for block in _blocks(numbered)
    )


def _insert(db: Any, collection: str, rows: list[dict[str, Any]], field: str) -> int:
    """Insert what is not there yet: after a kill, or when the answer to the first try was lost."""
    try:
        return len(db[collection].insert_many([dict(row) for row in rows], ordered=False).inserted_ids)
    except BulkWriteError as error:
        if any(write_error.get("code") != DUPLICATE_KEY for write_error in error.details.get("writeErrors", [])):
            raise
        _check_own_documents(db[collection], rows, field)
        return int(error.details.get("nInserted", 0))


def _check_own_documents(collection: Any, rows: list[dict[str, Any]], field: str) -> None:
    """Refuse when an idx that was reserved for us holds the document of someone who did not ask."""
    wanted = {row["idx"]: row[field] for row in rows}
    idx_range = {"idx": {"$gte": min(wanted), "$lte": max(wanted)}}
    for row in collection.find(idx_range, {"_id": 0, "idx": 1, field: 1}):
        if row.get(field) != wanted.get(row["idx"]):
            raise TextmillError(
                f"{collection.name}: idx {row['idx']} holds another document than the one to be loaded; "
                f"something else writes there; load into another collection"
            )


def reserve_idx_range(server: Server, collection: str, load: dict[str, Any]) -> int:
    """The first idx of a file's documents: where it was put before, else a stretch after all others, taken in one step."""
    server.request(
        lambda db: db[META_COLLECTION].update_one(
            {"collection_name": collection}, {"$setOnInsert": {"num_docs": 0}}, upsert=True
        )
    )
    while True:
        meta = server.request(lambda db: db[META_COLLECTION].find_one({"collection_name": collection}))
        for known in meta.get("loads", []):
            if load.items() <= known.items():
                return int(known["first"])
        last = server.request(lambda db: db[collection].find_one({"idx": {"$gte": 0}}, {"idx": 1}, sort=[("idx", -1)]))
        first = max(int(last["idx"]) + 1 if last else 0, int(meta.get("next_idx", 0)))
        # Another loader may be here at the same moment: the stretch is ours only if next_idx is still what we saw.
        unchanged = {"collection_name": collection, "next_idx": meta.get("next_idx", {"$exists": False})}
        change = {"$set": {"next_idx": first + load["documents"]}, "$push": {"loads": {**load, "first": first}}}
        # An answer that is lost in an outage is no matter: the next round finds the load by its digest.
        server.request(lambda db, unchanged=unchanged, change=change: db[META_COLLECTION].update_one(unchanged, change))  # type: ignore[misc]


def _ensure_idx_index(server: Server, collection: str) -> None:
    if not has_idx_index(server, collection):
        try:
            server.request(lambda db: db[collection].create_index("idx", unique=True))
        except TextmillError as error:
            raise TextmillError(
                f"{collection}: no index on idx can be made ({error}); two documents may share an idx"
            ) from None


def update_document_count(server: Server, collection: str) -> int:
    """Count a collection, and set its num_docs of meta_info right."""
    count: int = server.request(lambda db: db[collection].count_documents({}))
    server.request(
        lambda db: db[META_COLLECTION].update_one(
            {"collection_name": collection}, {"$set": {"num_docs": count}}, upsert=True
        )
    )
    return count


def parse_place(server: Server, place: str) -> tuple[str, int]:
    """Collection and idx out of a document's id."""
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
    """Records, and those with a text."""
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
                continue  # counted as bad; a text that cannot be encoded is one too
