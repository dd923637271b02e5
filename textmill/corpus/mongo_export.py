"""Export a finished corpus to MongoDB: write cleaned text back, and load kept documents into a collection.

Every write can be repeated: after a kill, the next run does the unfinished task again, and no document is loaded twice,
since its _id consists of the corpus' fingerprint and its number: "3f2a90c41d7be856-0", "3f2a90c41d7be856-1" ...
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import CorpusConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.formats.mongo import (
    CLEANED_FIELD,
    META_COLLECTION,
    MongoServer,
    advise_index,
    check_collections,
    has_idx_index,
    next_idx,
    open_server,
)
from textmill.corpus.shards import list_shards, read_documents
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.storage.files import file_lock, format_path, read_json, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import open_manifest

DONE_FILE = "mongo.json"
"""Lists the finished tasks with their counts; stored in the corpus folder."""
WRITE_BLOCK = 1000
"""Documents per write."""


def check_export(config: CorpusConfig, sources: Sequence[Source]) -> None:
    """Raise an error before any work if the export is not possible."""
    mongo_sources = [source for source in sources if source.format == "mongo"]
    if config.mongo_write_back and not mongo_sources:
        raise TextmillError("corpus.mongo_write_back: no MongoDB source; add mongo:db_config.json to corpus.sources")
    for source in mongo_sources if config.mongo_write_back else ():
        if source.text_key == CLEANED_FIELD:
            raise TextmillError(
                f"corpus.mongo_write_back: would overwrite {CLEANED_FIELD}, which {source.name} is read from; "
                f"read another field, such as form"
            )
        server = open_server(source.address)
        _check_writable(server)
        server.close()
    if config.mongo_load:
        target, collection = _open_target(config.mongo_load)
        for source in mongo_sources:
            server = open_server(source.address)
            same_database = (server.address, server.database) == (target.address, target.database)
            if same_database and collection in server.collections:
                raise TextmillError(f"corpus.mongo_load: '{collection}' is also a source; load into another collection")
        _ensure_index(target, collection)
        target.close()


def _check_writable(server: MongoServer) -> None:
    """Raise an error for a collection that does not exist or has no index on idx."""
    check_collections(server)
    for name in server.collections:
        if not server.request(has_idx_index, name):
            raise TextmillError(f"{server.path}: {name}: no index on idx; {advise_index(name)}")


def _open_target(path: str) -> tuple[MongoServer, str]:
    """The server of `corpus.mongo_load`, and its only collection."""
    server = open_server(path)
    if len(server.collections) > 1:
        raise TextmillError(
            f"{server.path}: COLLECTIONS lists {', '.join(server.collections)}; corpus.mongo_load needs a "
            "db_config.json with only the collection to load into"
        )
    return server, server.collections[0]


def _ensure_index(server: MongoServer, collection: str) -> None:
    """Create the collection's index on idx, unless it has one."""
    if not server.request(has_idx_index, collection):
        server.request(lambda db: db[collection].create_index("idx", unique=True))


def export_to_mongo(config: CorpusConfig, folder: Path, sources: Sequence[Source]) -> None:
    """Run the configured exports that are not done, and print the counts."""
    lock = folder.with_name(folder.name + ".mongo.lock")
    with file_lock(lock, f"{folder}: another textmill process is exporting it to MongoDB; wait until it has finished"):
        for source in sources:
            if config.mongo_write_back and source.format == "mongo":
                server = open_server(source.address)
                task = f"write back to {source.name} ({server.database})"
                _run(folder, task, partial(_write_back, server, folder, source))
        if config.mongo_load:
            server, collection = _open_target(config.mongo_load)
            task = f"load into {collection} of {config.mongo_load} ({server.database}, {CLEANED_FIELD})"
            _run(folder, task, partial(_load, server, folder, collection))
        lock.unlink()


def _run(folder: Path, task: str, work: Callable[[], Counter[str]]) -> None:
    """Do a task that is not done, record it, and print its counts; only `changed` may differ when it is repeated."""
    path = folder / DONE_FILE
    done = read_json(path) if path.is_file() else {}
    changed = None
    if task not in done:
        counts = work()
        changed = counts.pop("changed")
        done[task] = counts
        write_json(path, done)
    summary = ", ".join(f"{count:,} {name}" for name, count in done[task].items())
    if changed is None:
        print(f"prepare: {task}: done already ({summary}); see {format_path(path)}")
    else:
        print(f"prepare: {task}: {summary}; {changed:,} changed now")


# Write cleaned text into the documents that it came from.


def _write_back(server: MongoServer, folder: Path, source: Source) -> Counter[str]:
    """Dropped documents get an empty text, which tells them from documents that were never cleaned."""
    _check_writable(server)
    is_kept = {collection: np.zeros(size, np.bool_) for collection, _, size in source.snapshot.ranges}

    def kept_texts() -> Iterator[tuple[str, int, str]]:
        for split in SPLITS:
            for document in chain.from_iterable(map(read_documents, list_shards(folder, split))):
                if document.source == source.name:
                    collection, idx = _parse_place(server, document.id)
                    is_kept[collection][idx] = True
                    yield collection, idx, document.text

    written = _write_texts(server, kept_texts())
    dropped = ((collection, int(idx), "") for collection, kept in is_kept.items() for idx in np.flatnonzero(~kept))
    emptied = _write_texts(server, dropped)
    server.close()
    return Counter(
        written=written["found"],
        gone=written["missing"],
        emptied=emptied["found"],
        changed=written["changed"] + emptied["changed"],
    )


def _parse_place(server: MongoServer, place: str) -> tuple[str, int]:
    """The collection and idx in a document's id: "web 17 65f0c2" -> ("web", 17)."""
    for name in server.collections:
        idx = place.removeprefix(f"{name} ").partition(" ")[0]
        if place.startswith(f"{name} ") and idx.isdigit():
            return name, int(idx)
    raise TextmillError(
        f"'{place}': not a document of {server.path}; its collections are {', '.join(server.collections)}"
    )


def _write_texts(server: MongoServer, texts: Iterable[tuple[str, int, str]]) -> Counter[str]:
    """Set `filt_text` for each (collection, idx, text); return how many were found, missing and changed."""
    from pymongo import UpdateOne  # formats/mongo.py says so if it is missing

    counts: Counter[str] = Counter()
    for block in _blocks(texts):
        updates_by_collection: dict[str, list[Any]] = {}
        for name, idx, text in block:
            update = UpdateOne({"idx": idx}, {"$set": {CLEANED_FIELD: text}})
            updates_by_collection.setdefault(name, []).append(update)
        for name, updates in updates_by_collection.items():
            result = server.request(
                lambda db, name, updates: db[name].bulk_write(updates, ordered=False), name, updates
            )
            found = result.matched_count
            counts.update(found=found, missing=len(updates) - found, changed=result.modified_count)
    return counts


def _blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Split into lists of WRITE_BLOCK."""
    stream = iter(rows)
    while block := list(islice(stream, WRITE_BLOCK)):
        yield block


# Load the kept documents of all sources into a collection.


def _load(server: MongoServer, folder: Path, collection: str) -> Counter[str]:
    _ensure_index(server, collection)
    manifest = open_manifest(folder, "prepare")
    load = manifest["fingerprint"][:16]
    first = server.request(_first_idx, collection, load)
    rows = ({"_id": f"{load}-{number}", "idx": first + number, **row} for number, row in enumerate(_rows(folder)))
    counts: Counter[str] = Counter(loaded=0, changed=0)
    with progress("prepare: load into MongoDB", total=manifest["documents"], unit="documents") as bar:
        for block in _blocks(rows):
            counts["loaded"] += len(block)
            counts["changed"] += server.request(_insert, collection, block)
            bar.advance(len(block))
    server.request(_update_document_count, collection)
    server.close()
    return counts


def _rows(folder: Path) -> Iterator[dict[str, Any]]:
    for split in SPLITS:
        for document in chain.from_iterable(map(read_documents, list_shards(folder, split))):
            meta = {"meta": json.loads(document.meta)} if document.meta else {}
            place = {"split": split, "source": document.source, "place": document.id}
            yield {CLEANED_FIELD: document.text, **place, **meta}


def _first_idx(db: Any, collection: str, load: str) -> int:
    """The idx of a load's first document: that of an unfinished or earlier load of the same corpus, else a new one."""
    earlier = db[collection].find_one({"_id": f"{load}-0"}, {"idx": 1})
    return int(earlier["idx"]) if earlier else next_idx(db, collection)


def _insert(db: Any, collection: str, rows: list[dict[str, Any]]) -> int:
    """Write documents, and return how many were not there already."""
    from pymongo import ReplaceOne  # formats/mongo.py says so if it is missing

    result = db[collection].bulk_write(
        [ReplaceOne({"_id": row["_id"]}, row, upsert=True) for row in rows], ordered=False
    )
    return int(result.upserted_count + result.modified_count)


def _update_document_count(db: Any, collection: str) -> None:
    """Store the number of documents of a collection as num_docs in meta_info."""
    recorded = {"$set": {"num_docs": db[collection].count_documents({})}}
    db[META_COLLECTION].update_one({"collection_name": collection}, recorded, upsert=True)
