"""Writing to MongoDB: cleaned text back to its documents, JSON lines into a collection, and the order that reading needs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from textmill.corpus.document import Document
from textmill.corpus.mongo_bounds import HOW_INDEX, has_idx
from textmill.corpus.mongo_server import META, Server, check_collections, open_server
from textmill.errors import TextmillError
from textmill.files import hash_file

BLOCK = 1000
"""Documents of one write."""
TAKEN = 11000
"""The server's code for an idx that is there already."""


def index_by_idx(path: str | Path) -> None:
    """Make the index on idx in every collection; without it each read looks at all documents."""
    server = open_server(path)
    check_collections(server)
    for name in server.collections:
        _make_index(server, name)


def mend_meta_info(path: str | Path) -> dict[str, int]:
    """Count every collection, set num_docs of meta_info right, and give the counts."""
    server = open_server(path)
    check_collections(server)
    return {name: _count(server, name) for name in server.collections}


def write_back(path: str | Path, documents: Iterable[Document]) -> dict[str, int]:
    """Put the text of documents that were read from here into their `filt_text`; done twice, it changes nothing more."""
    server = open_server(path)
    check_collections(server)
    for name in server.collections:
        if not has_idx(server, name):
            raise TextmillError(f"{path}: {name}: no index on idx; {HOW_INDEX}('{path}')")
    counts = {"documents": 0, "changed": 0, "missing": 0}
    places = ((*_place_of(server, document), document.text) for document in documents)
    for block in _blocks(places):
        changes: dict[str, list[Any]] = {}
        for name, idx, text in block:
            changes.setdefault(name, []).append(UpdateOne({"idx": idx}, {"$set": {"filt_text": text}}))
        for name, updates in changes.items():
            done = server.ask(lambda db, name=name, updates=updates: db[name].bulk_write(updates, ordered=False))  # type: ignore[misc]
            counts["documents"] += len(updates)
            counts["changed"] += done.modified_count
            counts["missing"] += len(updates) - done.matched_count
    return counts


def load_lines(
    path: str | Path, collection: str, files: Sequence[str | Path], field: str = "form", text_key: str = "text"
) -> dict[str, int]:
    """Load JSON lines, their text as `field`, at the next free idx; a file that is loaded already, or in part, is not doubled."""
    server = open_server(path)
    if collection not in server.collections:
        raise TextmillError(
            f"{path}: COLLECTIONS does not name '{collection}'; add it there, or choose one of {', '.join(server.collections)}"
        )
    _make_index(server, collection)
    counts = {"records": 0, "loaded": 0, "there": 0, "bad": 0}
    for file in map(Path, files):
        records, texts = _count_lines(file, text_key)
        first = _reserve(server, collection, {"sha256": hash_file(file), "field": field, "text_key": text_key, "documents": texts})
        counts["records"] += records
        counts["bad"] += records - texts
        rows = ({"idx": first + number, field: text} for number, text in enumerate(_texts(file, text_key)))
        for block in _blocks(rows):
            new = server.ask(lambda db, block=block: _insert(db[collection], block))  # type: ignore[misc]
            counts["loaded"] += new
            counts["there"] += len(block) - new
    _count(server, collection)
    return counts


def _insert(collection: Any, rows: list[dict[str, Any]]) -> int:
    """Insert what is not there yet: after a kill, or when the answer to the first try was lost."""
    try:
        return len(collection.insert_many([dict(row) for row in rows], ordered=False).inserted_ids)
    except BulkWriteError as error:
        if any(one.get("code") != TAKEN for one in error.details.get("writeErrors", [])):
            raise
        return int(error.details.get("nInserted", 0))


def _reserve(server: Server, collection: str, load: dict[str, Any]) -> int:
    """The first idx of a file's documents: where it was put before, else a stretch after all others, taken in one step."""
    server.ask(lambda db: db[META].update_one({"collection_name": collection}, {"$setOnInsert": {"num_docs": 0}}, upsert=True))
    while True:
        meta = server.ask(lambda db: db[META].find_one({"collection_name": collection}))
        for known in meta.get("loads", []):
            if load.items() <= known.items():
                return int(known["first"])
        last = server.ask(lambda db: db[collection].find_one({"idx": {"$gte": 0}}, {"idx": 1}, sort=[("idx", -1)]))
        first = max(int(last["idx"]) + 1 if last else 0, int(meta.get("next_idx", 0)))
        # Another loader may be here at the same moment: the stretch is ours only if next_idx is still what we saw.
        seen = {"collection_name": collection, "next_idx": meta.get("next_idx", {"$exists": False})}
        change = {"$set": {"next_idx": first + load["documents"]}, "$push": {"loads": {**load, "first": first}}}
        # An answer that is lost in an outage is no matter: the next round finds the load by its digest.
        server.ask(lambda db, seen=seen, change=change: db[META].update_one(seen, change))  # type: ignore[misc]


def _make_index(server: Server, collection: str) -> None:
    if not has_idx(server, collection):
        try:
            server.ask(lambda db: db[collection].create_index("idx", unique=True))
        except TextmillError as error:
            raise TextmillError(f"{collection}: no index on idx can be made ({error}); two documents may share an idx") from None


def _count(server: Server, collection: str) -> int:
    count: int = server.ask(lambda db: db[collection].count_documents({}))
    server.ask(lambda db: db[META].update_one({"collection_name": collection}, {"$set": {"num_docs": count}}, upsert=True))
    return count


def _place_of(server: Server, document: Document) -> tuple[str, int]:
    """Collection and idx out of a document's id."""
    for name in server.collections:
        idx = document.id.removeprefix(name + " ").partition(" ")[0]
        if document.id.startswith(name + " ") and idx.isdigit():
            return name, int(idx)
    raise TextmillError(
        f"{document.source}, {document.id}: not a document of {server.path}; its collections are {', '.join(server.collections)}"
    )


def _blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    stream = iter(rows)
    while block := list(islice(stream, BLOCK)):
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
