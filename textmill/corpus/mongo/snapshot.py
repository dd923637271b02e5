"""Record the ranges of MongoDB collections, find irregularities in them, and compute a fingerprint of their content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from textmill.corpus.mongo.server import META_COLLECTION, MongoServer
from textmill.storage.files import hash_json

Row = dict[str, Any]
"""A MongoDB document."""
HAS_IDX = {"idx": {"$gte": 0}}
"""The condition that a document has an idx."""
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


def find_collection_ranges(server: MongoServer) -> tuple[CollectionRange, ...]:
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
    last = db[collection].find_one(HAS_IDX, {"idx": 1}, sort=[("idx", -1)])
    return int(last["idx"]) + 1 if last else 0


def find_irregularities(server: MongoServer, ranges: Sequence[CollectionRange]) -> Iterator[str]:
    """Yield a warning for each irregularity of the collections.

    A collection with the idx 0, 1, 1, 4 and a document without idx has a size of 5, 5 documents, 4 with an idx and 3
    different ones: 2 positions have no document, 1 document has no idx, and 1 has the idx of another.
    """
    recorded_counts = {
        row.get("collection_name"): row.get("num_docs")
        for row in server.request(lambda db: list(db[META_COLLECTION].find()))
    }
    for name, _, size in ranges:
        documents = server.request(partial(_count, collection=name))
        with_idx = server.request(partial(_count_with_idx, collection=name))
        different = with_idx
        if not _has_unique_index(server, name):
            different = server.request(partial(_count_different_idx, collection=name))
        if different < size:
            yield f"{name}: {size - different:,} of {size:,} positions have no document (deleted?); they are skipped"
        if with_idx < documents:
            yield f"{name}: {documents - with_idx:,} of {documents:,} documents have no idx; they are not read"
        if different < with_idx:
            yield f"{name}: {with_idx - different:,} of {documents:,} documents have an idx that another one has too"
        if name in recorded_counts and recorded_counts[name] != documents:
            yield (
                f"{name}: {META_COLLECTION} records {recorded_counts[name]} documents, the collection has "
                f"{documents:,}; the recorded number is ignored"
            )
        if not has_idx_index(server, name):
            yield f"{name}: no index on idx, so reading is slow; {INDEX_ADVICE}('{server.path}')"


def _count(db: Any, collection: str) -> int:
    return int(db[collection].count_documents({}))


def _count_with_idx(db: Any, collection: str) -> int:
    return int(db[collection].count_documents(HAS_IDX))


def _count_different_idx(db: Any, collection: str) -> int:
    one_row_per_idx = [{"$match": HAS_IDX}, {"$group": {"_id": "$idx"}}]
    count_rows = {"$group": {"_id": None, "count": {"$sum": 1}}}
    result = db[collection].aggregate([*one_row_per_idx, count_rows], allowDiskUse=True)
    return next((int(row["count"]) for row in result), 0)


def _has_unique_index(server: MongoServer, collection: str) -> bool:
    indexes = server.request(lambda db: db[collection].index_information())
    return any(index.get("unique") and [key for key, _ in index["key"]] == ["idx"] for index in indexes.values())


def has_idx_index(server: MongoServer, collection: str) -> bool:
    """True if the collection has an index on idx."""
    indexes = server.request(lambda db: db[collection].index_information())
    return any(index["key"] and index["key"][0][0] == "idx" for index in indexes.values())


def fingerprint_collections(server: MongoServer, ranges: Sequence[CollectionRange], read_original: bool = False) -> str:
    """A hash of each collection's size, number of documents and a few probed documents.

    Documents added after the recorded ranges do not change it; with `read_original`, neither does text that was written
    back.
    """
    return hash_json([[one.collection, one.size, *_probe(server, one, read_original)] for one in ranges])


def _probe(
    server: MongoServer, collection_range: CollectionRange, read_original: bool
) -> tuple[int | list[int], list[str]]:
    """(number of documents, probed documents) of a range.

    If there are documents without idx, the number is a list of two: documents with an idx, and without.
    """
    name = collection_range.collection
    size = collection_range.size
    probed_idx = _spread_evenly(size)
    without_cleaned = {CLEANED_FIELD: 0} if read_original else None
    in_range = server.request(lambda db: db[name].count_documents({"idx": {"$gte": 0, "$lt": size}}))
    rows = server.request(lambda db: list(db[name].find({"idx": {"$in": probed_idx}}, without_cleaned)))
    with_idx = server.request(partial(_count_with_idx, collection=name))
    without_idx = server.request(lambda db: db[name].estimated_document_count()) - with_idx
    texts = sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)
    return [in_range, without_idx] if without_idx else in_range, texts


def _spread_evenly(size: int) -> list[int]:
    """The idx of the documents to probe, from the first to the last: of 35 documents 0, 2, 4 ... 34."""
    if size == 0:
        return []
    gaps = PROBES + 1
    return sorted({(size - 1) * number // gaps for number in range(gaps + 1)})
