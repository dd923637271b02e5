"""Write to MongoDB: cleaned text into existing documents, and new documents into a collection.

New documents get consecutive idx. Their range is reserved in meta_info before they are inserted, so that a load can be
repeated after a kill and two loads never get the same idx. meta_info after files of 300 and 200 documents were loaded:

    {"collection_name": "web", "num_docs": 500, "next_idx": 500,
     "loads": [{"sha256": ..., "documents": 300, "first": 0}, {"sha256": ..., "documents": 200, "first": 300}]}
"""

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
from textmill.corpus.mongo.server import META_COLLECTION, MongoServer, check_collections, open_server
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


def check_writable(server: MongoServer) -> None:
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


def parse_place(server: MongoServer, place: str) -> tuple[str, int]:
    """The collection and idx in a document's id: "web 17 65f0c2" -> ("web", 17)."""
    for name in server.collections:
        idx = place.removeprefix(f"{name} ").partition(" ")[0]
        if place.startswith(f"{name} ") and idx.isdigit():
            return name, int(idx)
    raise TextmillError(
        f"'{place}': not a document of {server.path}; its collections are {', '.join(server.collections)}"
    )


def write_texts(server: MongoServer, texts: Iterable[tuple[str, int, str]]) -> dict[str, int]:
    """Set `filt_text` for each (collection, idx, text); return the numbers of documents, changed and missing ones."""
    counts = {"documents": 0, "changed": 0, "missing": 0}
    for block in _blocks(texts):
        updates_by_collection: dict[str, list[Any]] = {}
        for name, idx, text in block:
            update = UpdateOne({"idx": idx}, {"$set": {CLEANED_FIELD: text}})
            updates_by_collection.setdefault(name, []).append(update)
        for name, updates in updates_by_collection.items():
            result = server.request(partial(_bulk_write, collection=name, updates=updates))
            counts["documents"] += len(updates)
            counts["changed"] += result.modified_count
            counts["missing"] += len(updates) - result.matched_count
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
        records = _count_records(file)
        documents = sum(1 for _ in _read_texts(file, text_key))
        load_record = {"sha256": hash_file(file), "field": field, "text_key": text_key, "documents": documents}
        first = reserve_idx_range(server, collection, load_record)
        rows = ({field: text} for text in _read_texts(file, text_key))
        inserted = insert_rows(server, collection, rows, first, field)
        counts["records"] += records
        counts["loaded"] += inserted
        counts["existing"] += documents - inserted
        counts["bad"] += records - documents
    update_document_count(server, collection)
    return counts


def _count_records(file: Path) -> int:
    """The number of lines that are not blank."""
    try:
        with open(file, "rb") as stream:
            return sum(1 for line in stream if line.strip())
    except OSError as error:
        raise TextmillError(f"{file}: not readable ({error.strerror})") from None


def _read_texts(file: Path, text_key: str) -> Iterator[str]:
    """Yield the texts of JSON lines; a line without a text that can be encoded is skipped."""
    with open(file, "rb") as stream:
        for line in stream:
            try:
                text = json.loads(line).get(text_key)
                if isinstance(text, str) and text.encode():
                    yield text
            except (ValueError, AttributeError, RecursionError):
                continue


def ensure_loadable(server: MongoServer, collection: str) -> None:
    """Raise an error for a collection that db_config.json does not list; otherwise create its index on idx."""
    if collection not in server.collections:
        raise TextmillError(
            f"{server.path}: COLLECTIONS does not list '{collection}'; "
            f"add it, or choose one of {', '.join(server.collections)}"
        )
    _ensure_idx_index(server, collection)


def _ensure_idx_index(server: MongoServer, collection: str) -> None:
    if not has_idx_index(server, collection):
        try:
            server.request(lambda db: db[collection].create_index("idx", unique=True))
        except TextmillError as error:
            raise TextmillError(
                f"{collection}: cannot create an index on idx ({error}); two documents may have the same idx"
            ) from None


def reserve_idx_range(server: MongoServer, collection: str, load_record: dict[str, Any]) -> int:
    """Reserve a range of idx for `documents` of the record and return its start; a repeated load gets its old range.

    The other entries of the record identify the load: the checksum of a file, or the fingerprint of a corpus.
    """
    server.request(partial(_create_meta, collection=collection))
    while True:
        meta = server.request(lambda db: db[META_COLLECTION].find_one({"collection_name": collection}))
        for earlier in meta.get("loads", []):
            if load_record.items() <= earlier.items():
                return int(earlier["first"])
        first = max(server.request(partial(next_idx, collection=collection)), int(meta.get("next_idx", 0)))
        # Even if the response is lost, the next round finds the load in meta_info.
        server.request(partial(_append_load, meta=meta, load_record=load_record, first=first))


def _create_meta(db: Any, collection: str) -> None:
    """Create the document of a collection in meta_info, if there is none."""
    change = {"$setOnInsert": {"num_docs": 0}}
    db[META_COLLECTION].update_one({"collection_name": collection}, change, upsert=True)


def _append_load(db: Any, meta: dict[str, Any], load_record: dict[str, Any], first: int) -> None:
    """Append a load to meta_info, unless another process has appended one since `meta` was read."""
    unchanged = {"collection_name": meta["collection_name"], "next_idx": meta.get("next_idx", {"$exists": False})}
    change = {
        "$set": {"next_idx": first + load_record["documents"]},
        "$push": {"loads": {**load_record, "first": first}},
    }
    db[META_COLLECTION].update_one(unchanged, change)


def insert_rows(server: MongoServer, collection: str, rows: Iterable[dict[str, Any]], first: int, field: str) -> int:
    """Insert documents with idx `first`, `first` + 1 ...; skip existing ones; return how many were new.

    `field` holds the text, by which existing documents are recognised.
    """
    numbered = ({"idx": first + number, **row} for number, row in enumerate(rows))
    return sum(
        server.request(partial(_insert, collection=collection, rows=block, field=field)) for block in _blocks(numbered)
    )


def _insert(db: Any, collection: str, rows: list[dict[str, Any]], field: str) -> int:
    """Insert the missing documents; some exist already after a kill or a lost response."""
    copies = [dict(row) for row in rows]  # pymongo adds an _id to each
    try:
        return len(db[collection].insert_many(copies, ordered=False).inserted_ids)
    except BulkWriteError as error:
        codes = {write_error.get("code") for write_error in error.details.get("writeErrors", [])}
        if codes - {DUPLICATE_KEY}:
            raise
        _check_own_documents(db[collection], rows, field)
        return int(error.details.get("nInserted", 0))


def _check_own_documents(collection: Any, rows: list[dict[str, Any]], field: str) -> None:
    """Raise an error if a reserved idx holds a document that another program wrote."""
    own_texts = {row["idx"]: row[field] for row in rows}
    idx_range = {"idx": {"$gte": min(own_texts), "$lte": max(own_texts)}}
    for row in collection.find(idx_range, {"_id": 0, "idx": 1, field: 1}):
        if row.get(field) != own_texts.get(row["idx"]):
            raise TextmillError(
                f"{collection.name}: idx {row['idx']} holds a different document; "
                f"another program writes to this collection; load into another one"
            )


def update_document_count(server: MongoServer, collection: str) -> int:
    """Count a collection and store the number as num_docs in meta_info."""
    count: int = server.request(lambda db: db[collection].count_documents({}))
    server.request(
        lambda db: db[META_COLLECTION].update_one(
            {"collection_name": collection}, {"$set": {"num_docs": count}}, upsert=True
        )
    )
    return count


def _blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Split into lists of WRITE_BLOCK."""
    stream = iter(rows)
    while block := list(islice(stream, WRITE_BLOCK)):
        yield block
