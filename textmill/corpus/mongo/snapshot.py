"""What a MongoDB index was when it was looked at: where each collection begins, what is odd about it, and a mark that tells a change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from textmill.corpus.mongo.server import META_COLLECTION, Server
from textmill.storage.files import hash_json

Row = dict[str, Any]
CLEANED_FIELD = "filt_text"
"""The field of cleaned text."""
ORIGINAL_FIELDS = ("form", "text")
"""Where the text is that nobody has cleaned."""
PROBES = 16
"""Documents of each collection that are looked at, besides the first and the last, to tell whether it has changed."""
INDEX_ADVICE = "make one: textmill.corpus.mongo.writing.create_idx_indexes"


class CollectionRange(NamedTuple):
    """The positions that a collection has in the index: `first` + idx."""

    collection: str
    first: int
    size: int


def text_field_names(text_key: str, read_original: bool = False) -> tuple[str, ...]:
    """Where the text is, the first that is there; `raw`: not in what an earlier cleaning wrote back."""
    if text_key != "text":
        return (text_key,)
    return ORIGINAL_FIELDS if read_original else (CLEANED_FIELD, *ORIGINAL_FIELDS)


def find_collection_ranges(server: Server) -> tuple[CollectionRange, ...]:
    """Where each collection begins: idx is the place in its collection, so a deleted document moves no other."""
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
    """What a person should know of the collections, a sentence each."""
    recorded_counts = {
        row.get("collection_name"): row.get("num_docs")
        for row in server.request(lambda db: list(db[META_COLLECTION].find()))
    }
    for collection_range in ranges:
        name, size = collection_range.collection, collection_range.size
        count = server.request(lambda db, name=name: db[name].estimated_document_count())  # type: ignore[misc]
        if count < size:
            yield f"{name}: {size - count:,} of {size:,} positions hold no document (deleted?); they are passed over"
        if count > size:
            yield f"{name}: {count - size:,} of {count:,} documents have no idx of their own; those without any are not read"
        if name in recorded_counts and recorded_counts[name] != count:
            yield f"{name}: {META_COLLECTION} says {recorded_counts[name]} documents, the collection has {count:,}; the collection counts"
        if not has_idx_index(server, name):
            yield f"{name}: no index on idx, so reading is slow; {INDEX_ADVICE}('{server.path}')"


def has_idx_index(server: Server, collection: str) -> bool:
    """Whether the collection can be searched by idx."""
    indexes = server.request(lambda db: db[collection].index_information())
    return any(
        collection_range["key"] and collection_range["key"][0][0] == "idx" for collection_range in indexes.values()
    )


def fingerprint_collections(server: Server, ranges: Sequence[CollectionRange], read_original: bool = False) -> str:
    """Changes with a collection's size, its number of documents, or what stands in a probe; what was added behind the bounds is not seen.

    `raw`: nor what a cleaning wrote back."""
    return hash_json(
        [
            [collection_range.collection, collection_range.size, *_probe(server, collection_range, read_original)]
            for collection_range in ranges
        ]
    )


def _probe(server: Server, collection_range: CollectionRange, read_original: bool) -> tuple[int, list[str]]:
    last = collection_range.size - 1
    positions = sorted({last * number // (PROBES + 1) for number in range(PROBES + 2)}) if collection_range.size else []
    count = server.request(lambda db: db[collection_range.collection].estimated_document_count())
    added = server.request(
        lambda db: db[collection_range.collection].count_documents({"idx": {"$gte": collection_range.size}})
    )
    rows = server.request(
        lambda db: list(
            db[collection_range.collection].find(
                {"idx": {"$in": positions}}, {CLEANED_FIELD: 0} if read_original else None
            )
        )
    )
    return count - added, sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)
