"""Export a finished corpus to MongoDB: write cleaned text back, and load kept documents into a collection.

Each shard is an idempotent step that is recorded when it is finished. After a kill, the next run continues there.

Loaded documents get consecutive idx. Their range is reserved in meta_info before they are inserted, so that a load can
be repeated after a kill and two loads never get the same idx. meta_info after corpora of 300 and 200 documents:

    {"collection_name": "web", "num_docs": 500, "next_idx": 500,
     "loads": [{"corpus": ..., "documents": 300, "first": 0}, {"corpus": ..., "documents": 200, "first": 300}]}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
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
from textmill.corpus.shards import count_documents, list_shards, read_documents, read_places
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.storage.files import file_lock, format_path, read_json, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import open_manifest

PROGRESS_FILE = "mongo.json"
"""Lists the finished steps; stored in the corpus folder."""
WRITE_BLOCK = 1000
"""Documents per write."""
DUPLICATE_KEY = 11000
"""The server's error code for an idx that exists already."""
Steps = dict[str, Callable[[], dict[str, int]]]
"""The parts of an export, by name: a shard, or what follows the last one. Each can be repeated and returns its counts,
of which only `changed` may differ then."""


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
        try:
            server.request(lambda db: db[collection].create_index("idx", unique=True))
        except TextmillError as error:
            raise TextmillError(
                f"{collection}: cannot create an index on idx ({error}); two documents may have the same idx"
            ) from None


def export_to_mongo(config: CorpusConfig, folder: Path, sources: Sequence[Source]) -> None:
    """Run the configured exports that are not finished, and print the counts."""
    lock = folder.with_name(folder.name + ".mongo.lock")
    with file_lock(lock, f"{folder}: another textmill process is exporting it to MongoDB; wait until it has finished"):
        for source in sources:
            if config.mongo_write_back and source.format == "mongo":
                _write_back(folder, source)
        if config.mongo_load:
            _load(folder, config.mongo_load)
        lock.unlink()


def _run_steps(folder: Path, task: str, steps: Steps, check: Callable[[], None]) -> None:
    """Run the steps that the progress file does not list, record each one, and print the counts.

    The file after the first of two shards: {"corpus": FINGERPRINT, "tasks": {TASK: {SHARD: {"loaded": 1000}}}}.
    """
    path = folder / PROGRESS_FILE
    fingerprint = open_manifest(folder)["fingerprint"]
    progress_record = read_json(path) if path.is_file() else {}
    if progress_record.get("corpus") != fingerprint:
        progress_record = {"corpus": fingerprint, "tasks": {}}
    counts_by_step = progress_record["tasks"].setdefault(task, {})
    pending = [name for name in steps if name not in counts_by_step]
    changed = 0
    if pending:
        check()
        with progress(f"prepare: {task}", total=len(pending), unit="shards") as bar:
            for name in pending:
                counts = steps[name]()
                changed += counts.pop("changed")
                counts_by_step[name] = counts
                write_json(path, progress_record)
                bar.advance(1)
    totals: Counter[str] = Counter()
    for counts in counts_by_step.values():
        totals.update(counts)
    summary = ", ".join(f"{total:,} {name}" for name, total in totals.items())
    outcome = f"{summary}; {changed:,} changed now" if pending else f"done already ({summary}); see {format_path(path)}"
    print(f"prepare: {task}: {outcome}")


# Write cleaned text into the documents that it came from.


def _write_back(folder: Path, source: Source) -> None:
    server = open_server(source.address)
    paths = [path for split in SPLITS for path in list_shards(folder, split)]
    steps: Steps = {path.name: partial(_write_shard, server, source.name, path) for path in paths}
    steps["dropped"] = partial(_empty_dropped, server, source, paths)
    _run_steps(folder, f"write back to {source.name} ({server.database})", steps, partial(_check_writable, server))
    server.close()


def _write_shard(server: MongoServer, source_name: str, path: Path) -> dict[str, int]:
    documents = (document for document in read_documents(path) if document.source == source_name)
    counts = _write_texts(server, ((*_parse_place(server, document.id), document.text) for document in documents))
    return {"written": counts["documents"] - counts["missing"], "gone": counts["missing"], "changed": counts["changed"]}


def _empty_dropped(server: MongoServer, source: Source, paths: Sequence[Path]) -> dict[str, int]:
    """Set the text of dropped documents to '', which tells them from documents that were never cleaned."""
    is_kept = {collection: np.zeros(size, np.bool_) for collection, _, size in source.snapshot.ranges}
    for path in paths:
        for source_name, place in read_places(path):
            if source_name == source.name:
                collection, idx = _parse_place(server, place)
                is_kept[collection][idx] = True
    dropped = ((collection, int(idx), "") for collection, kept in is_kept.items() for idx in np.flatnonzero(~kept))
    counts = _write_texts(server, dropped)
    return {"emptied": counts["documents"] - counts["missing"], "changed": counts["changed"]}


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
    """Set `filt_text` for each (collection, idx, text); return the numbers of documents, changed and missing ones."""
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
            missing = len(updates) - result.matched_count
            counts.update(documents=len(updates), changed=result.modified_count, missing=missing)
    return counts


def _blocks(rows: Iterable[Any]) -> Iterator[list[Any]]:
    """Split into lists of WRITE_BLOCK."""
    stream = iter(rows)
    while block := list(islice(stream, WRITE_BLOCK)):
        yield block


# Load the kept documents of all sources into a collection.


def _load(folder: Path, path: str) -> None:
    server, collection = _open_target(path)
    manifest = open_manifest(folder, "prepare")
    load_record = {"corpus": manifest["fingerprint"], "field": CLEANED_FIELD, "documents": manifest["documents"]}
    steps: Steps = {}
    documents_before = 0
    for split in SPLITS:
        for shard in list_shards(folder, split):
            rows = partial(_rows, shard, split)
            steps[shard.name] = partial(_load_shard, server, collection, load_record, rows, documents_before)
            documents_before += count_documents(shard)
    steps["meta_info"] = partial(_update_document_count, server, collection)
    task = f"load into {collection} of {path} ({server.database}, {CLEANED_FIELD})"
    _run_steps(folder, task, steps, partial(_ensure_index, server, collection))
    server.close()


def _rows(shard: Path, split: str) -> Iterator[dict[str, Any]]:
    for document in read_documents(shard):
        meta = {"meta": json.loads(document.meta)} if document.meta else {}
        yield {CLEANED_FIELD: document.text, "split": split, "source": document.source, "place": document.id, **meta}


def _load_shard(
    server: MongoServer,
    collection: str,
    load_record: dict[str, Any],
    rows: Callable[[], Iterator[dict[str, Any]]],
    documents_before: int,
) -> dict[str, int]:
    """Insert the documents of a shard; `documents_before` are in earlier shards."""
    first = _reserve_idx_range(server, collection, load_record) + documents_before
    numbered = ({"idx": first + number, **row} for number, row in enumerate(rows()))
    counts = {"loaded": 0, "changed": 0}
    for block in _blocks(numbered):
        counts["loaded"] += len(block)
        counts["changed"] += server.request(_insert, collection, block)
    return counts


def _reserve_idx_range(server: MongoServer, collection: str, load_record: dict[str, Any]) -> int:
    """Reserve a range of idx for `documents` of the record and return its start; a repeated load gets its old range.

    The other entries of the record identify the load.
    """
    is_own = {"collection_name": collection}
    new = {"$setOnInsert": {"num_docs": 0}}
    server.request(lambda db: db[META_COLLECTION].update_one(is_own, new, upsert=True))
    while True:
        meta = server.request(lambda db: db[META_COLLECTION].find_one(is_own))
        for earlier in meta.get("loads", []):
            if load_record.items() <= earlier.items():
                return int(earlier["first"])
        first = max(server.request(next_idx, collection), int(meta.get("next_idx", 0)))
        # Even if the response is lost, the next round finds the load in meta_info.
        server.request(_append_load, meta, load_record, first)


def _append_load(db: Any, meta: dict[str, Any], load_record: dict[str, Any], first: int) -> None:
    """Append a load to meta_info, unless another process has appended one since `meta` was read."""
    unchanged = {"collection_name": meta["collection_name"], "next_idx": meta.get("next_idx", {"$exists": False})}
    change = {
        "$set": {"next_idx": first + load_record["documents"]},
        "$push": {"loads": {**load_record, "first": first}},
    }
    db[META_COLLECTION].update_one(unchanged, change)


def _insert(db: Any, collection: str, rows: list[dict[str, Any]]) -> int:
    """Insert the missing documents, and return their number; some exist already after a kill or a lost response, and
    are recognised by their text."""
    from pymongo.errors import BulkWriteError

    copies = [dict(row) for row in rows]  # pymongo adds an _id to each
    try:
        return len(db[collection].insert_many(copies, ordered=False).inserted_ids)
    except BulkWriteError as error:
        codes = {write_error.get("code") for write_error in error.details.get("writeErrors", [])}
        if codes - {DUPLICATE_KEY}:
            raise
        new = int(error.details.get("nInserted", 0))
    own_texts = {row["idx"]: row[CLEANED_FIELD] for row in rows}
    idx_range = {"idx": {"$gte": min(own_texts), "$lte": max(own_texts)}}
    for row in db[collection].find(idx_range, {"_id": 0, "idx": 1, CLEANED_FIELD: 1}):
        if row.get(CLEANED_FIELD) != own_texts.get(row["idx"]):
            raise TextmillError(
                f"{collection}: idx {row['idx']} holds a different document; "
                f"another program writes to this collection; load into another one"
            )
    return new


def _update_document_count(server: MongoServer, collection: str) -> dict[str, int]:
    """Store the number of documents of a collection as num_docs in meta_info."""
    count = server.request(lambda db: db[collection].count_documents({}))
    recorded = {"$set": {"num_docs": count}}
    server.request(lambda db: db[META_COLLECTION].update_one({"collection_name": collection}, recorded, upsert=True))
    return {"changed": 0}
