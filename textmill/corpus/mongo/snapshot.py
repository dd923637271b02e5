"""What a MongoDB index was when it was looked at: where each collection begins, what is odd about it, and a mark that tells a change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from textmill.corpus.mongo.server import META, Server
from textmill.storage.files import hash_json

Row = dict[str, Any]
CLEANED = "filt_text"
"""The field of cleaned text."""
RAW_FIELDS = ("form", "text")
"""Where the text is that nobody has cleaned."""
PROBES = 16
"""Documents of each collection that are looked at, besides the first and the last, to tell whether it has changed."""
HOW_INDEX = "make one: textmill.corpus.mongo.writing.index_by_idx"


class Stretch(NamedTuple):
    """The positions that a collection has in the index: `first` + idx."""

    collection: str
    first: int
    size: int


def text_fields(text_key: str, raw: bool = False) -> tuple[str, ...]:
    """Where the text is, the first that is there; `raw`: not in what an earlier cleaning wrote back."""
    if text_key != "text":
        return (text_key,)
    return RAW_FIELDS if raw else (CLEANED, *RAW_FIELDS)


def bounds_of(server: Server) -> tuple[Stretch, ...]:
    """Where each collection begins: idx is the place in its collection, so a deleted document moves no other."""
    bounds: list[Stretch] = []
    first = 0
    for name in server.collections:
        last = server.ask(lambda db, name=name: db[name].find_one({"idx": {"$gte": 0}}, {"idx": 1}, sort=[("idx", -1)]))  # type: ignore[misc]
        size = int(last["idx"]) + 1 if last else 0
        bounds.append(Stretch(name, first, size))
        first += size
    return tuple(bounds)


def notes_on(server: Server, bounds: Sequence[Stretch]) -> Iterator[str]:
    """What a person should know of the collections, a sentence each."""
    told = {row.get("collection_name"): row.get("num_docs") for row in server.ask(lambda db: list(db[META].find()))}
    for one in bounds:
        name, size = one.collection, one.size
        count = server.ask(lambda db, name=name: db[name].estimated_document_count())  # type: ignore[misc]
        if count < size:
            yield f"{name}: {size - count:,} of {size:,} positions hold no document (deleted?); they are passed over"
        if count > size:
            yield f"{name}: {count - size:,} of {count:,} documents have no idx of their own; those without any are not read"
        if name in told and told[name] != count:
            yield f"{name}: {META} says {told[name]} documents, the collection has {count:,}; the collection counts"
        if not has_idx(server, name):
            yield f"{name}: no index on idx, so reading is slow; {HOW_INDEX}('{server.path}')"


def has_idx(server: Server, collection: str) -> bool:
    """Whether the collection can be searched by idx."""
    kept = server.ask(lambda db: db[collection].index_information())
    return any(one["key"] and one["key"][0][0] == "idx" for one in kept.values())


def mark_of(server: Server, bounds: Sequence[Stretch], raw: bool = False) -> str:
    """Changes with a collection's size, its number of documents, or what stands in a probe; what was added behind the bounds is not seen.

    `raw`: nor what a cleaning wrote back."""
    return hash_json([[one.collection, one.size, *_look_at(server, one, raw)] for one in bounds])


def _look_at(server: Server, one: Stretch, raw: bool) -> tuple[int, list[str]]:
    last = one.size - 1
    places = sorted({last * number // (PROBES + 1) for number in range(PROBES + 2)}) if one.size else []
    count = server.ask(lambda db: db[one.collection].estimated_document_count())
    added = server.ask(lambda db: db[one.collection].count_documents({"idx": {"$gte": one.size}}))
    rows = server.ask(lambda db: list(db[one.collection].find({"idx": {"$in": places}}, {CLEANED: 0} if raw else None)))
    return count - added, sorted(json.dumps(row, default=str, sort_keys=True) for row in rows)
