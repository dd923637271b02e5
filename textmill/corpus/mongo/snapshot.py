"""Record the ranges of MongoDB collections, find irregularities in them, and compute a fingerprint of their content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from textmill.corpus.mongo.server import META_COLLECTION, Server
from textmill.storage.files import hash_json

Row = dict[str, Any]
CLEANED_FIELD = "filt_text"
"""The field that holds cleaned text."""
ORIGINAL_FIELDS = ("form", "text")
"""The fields that may hold the original text; the first present one is read."""
PROBES = 16
"""Documents of each collection in the fingerprint, besides the first and the last."""
INDEX_ADVICE = "create one: textmill.corpus.mongo.writing.create_idx_indexes"


class CollectionRange(NamedTuple):
    """The positions of a collection: a document is at `first` + its idx."""

    collection: str
    first: int
    size: int


def text_field_names(text_key: str, read_original: bool = False) -> tuple[str, ...]:
    """The fields that may hold the text, in order of preference; `read_original`: without the cleaned text."""
    if text_key != "text":
        return (text_key,)
    return ORIGINAL_FIELDS if read_original else (CLEANED_FIELD, *ORIGINAL_FIELDS)


def find_collection_ranges(server: Server) -> tuple[CollectionRange, ...]:
    """The range of each collection. A position is based on idx, so deleting a document moves no other."""
    ranges: list[CollectionRange] = []
    first = 0
    for name in server.collections:
        size = server.request(partial(next_idx, collection=name))
        ranges.append(CollectionRange(name, first, size))
        first += size
    return tuple(ranges)


def next_idx(db: Any, collection: str) -> int:
    """The highest idx of a collection plus one; 0 for an empty collection."""
    last = db[collection].find_one({"idx": {"$gte": 0}}, {"idx": 1}, sort=[("idx", -1)])
    return int(last["idx"]) + 1 if last else 0


def find_irregularities(server: Server, ranges: Sequence[CollectionRange]) -> Iterator[str]:
    """Yield a warning for each irregularity of the collections."""
    recorded_counts = {
        row.get("collection_name"): row.get("num_docs")
        for row in server.request(lambda db: list(db[META_COLLECTION].find()))
    }
    for collection_range in ranges:
        name, size = collection_range.collection, collection_range.size
        count = server.request(partial(_count, collection=name))
        numbered = server.request(partial(_count, collection=name, is_numbered=True))
        filled = numbered if _has_unique_index(server, name) else server.request(partial(_distinct, collection=name))
        if filled < size:
            yield f"{name}: {size - filled:,} of {size:,} positions have no document (deleted?); they are skipped"
        if numbered < count:
            yield f"{name}: {count - numbered:,} of {count:,} documents have no idx; they are not read"
        if filled < numbered:
            yield f"{name}: {numbered - filled:,} of {count:,} documents have an idx that another one has too"
        if name in recorded_counts and recorded_counts[name] != count:
            yield (
                f"{name}: {META_COLLECTION} records {recorded_counts[name]} documents, the collection has {count:,}; "
                f"the recorded number is ignored"
            )
        if not has_idx_index(server, name):
            yield f"{name}: no index on idx, so reading is slow; {INDEX_ADVICE}('{server.path}')"


def _count(db: Any, collection: str, is_numbered: bool = False) -> int:
    """The number of documents of a collection, or of those with an idx."""
    found = db[collection].count_documents({"idx": {"$gte": 0}} if is_numbered else {})
    return int(found)


def _distinct(db: Any, collection: str) -> int:
    """The number of different idx in a collection."""
    steps = [{"$match": {"idx": {"$gte": 0}}}, {"$group": {"_id": "$idx"}}, {"$group": {"_id": None, "n": {"$sum": 1}}}]
    return next((int(row["n"]) for row in db[collection].aggregate(steps, allowDiskUse=True)), 0)


def _has_unique_index(server: Server, collection: str) -> bool:
    indexes = server.request(lambda db: db[collection].index_information())
    return any(index.get("unique") and [key for key, _ in index["key"]] == ["idx"] for index in indexes.values())


def has_idx_index(server: Server, collection: str) -> bool:
    """True if the collection has an index on idx."""
    indexes = server.request(lambda db: db[collection].index_information())
    return any(index["key"] and index["key"][0][0] == "idx" for index in indexes.values())


def fingerprint_collections(server: Server, ranges: Sequence[CollectionRange], read_original: bool = False) -> str:
    """A hash of each collection's size, number of documents and a few probed documents.

    Documents added after the recorded ranges do not change it; with `read_original`, neither does text that was written
    back.
    """
    return hash_json(
        [
            [collection_range.collection, collection_range.size, *_probe(server, collection_range, read_original)]
            for collection_range in ranges
        ]
    )


def _probe(server: Server, collection_range: CollectionRange, read_original: bool) -> tuple[int | list[int], list[str]]:
    """The number of documents, with that of documents without idx if there are any, and the probed documents."""
    name, size = collection_range.collection, collection_range.size
    positions = sorted({(size - 1) * number // (PROBES + 1) for number in range(PROBES + 2)}) if size else []
    fields = {CLEANED_FIELD: 0} if read_original else None
    count = server.request(lambda db: db[name].count_documents({"idx": {"$gte": 0, "$lt": size}}))
    rows = server.request(lambda db: list(db[name].find({"idx": {"$in": positions}}, fields)))
    numbered = server.request(partial(_count, collection=name, is_numbered=True))
    others = server.request(lambda db: db[name].estimated_document_count()) - numbered
    return [count, others] if others else count, sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)
