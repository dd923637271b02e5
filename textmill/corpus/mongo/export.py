"""What goes from a finished corpus to MongoDB: cleaned text back to its documents, and kept documents into a collection.

Each shard is a step that may be done twice, and is noted when it is through: killed at any moment, the next run goes on there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import CorpusConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.mongo.server import Server, open_server
from textmill.corpus.mongo.writing import (
    check_to_load,
    check_to_write,
    insert_rows,
    place_in,
    reserve,
    set_count,
    write_texts,
)
from textmill.corpus.shards import count_documents, read_documents, read_places, shards_of
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.storage.files import locked, read_json, shown, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import open_manifest

NOTES = "mongo.json"
Step = tuple[str, Callable[[], dict[str, int]]]
"""A name, and work that gives its counts: those that do not depend on an earlier try, and `changed`."""


def check_deliveries(config: CorpusConfig, sources: Sequence[Source]) -> None:
    """Refuse what cannot be delivered, before any work."""
    indexes = [source for source in sources if source.format == "mongo"]
    if config.mongo_write_back:
        if not indexes:
            raise TextmillError(
                "corpus.mongo_write_back: no source to write back to; name a mongo:db_config.json in corpus.sources"
            )
        if source := next((one for one in indexes if one.text_key == "filt_text"), None):
            raise TextmillError(
                f"corpus.mongo_write_back: {source.name} is read from filt_text, which would be written over"
            )
        for source in indexes:
            server = open_server(source.address)
            check_to_write(server)
            server.close()
    if config.mongo_load and config.mongo_config:
        target = open_server(config.mongo_config)
        for source in indexes:
            server = open_server(source.address)
            if (server.address, server.database) == (
                target.address,
                target.database,
            ) and config.mongo_load in server.collections:
                raise TextmillError(
                    f"corpus.mongo_load: '{config.mongo_load}' is a source too; load into another collection"
                )
        check_to_load(target, config.mongo_load)
        target.close()


def deliver(config: CorpusConfig, folder: Path, sources: Sequence[Source]) -> None:
    """Do what is asked and not done yet; say what was done."""
    lock = folder.with_name(folder.name + ".mongo.lock")
    with locked(lock, f"{folder}: another textmill is bringing it to MongoDB; wait for it"):
        if config.mongo_write_back:
            for source in sources:
                if source.format == "mongo":
                    _write_back(folder, source)
        if config.mongo_load and config.mongo_config:
            _load(folder, config.mongo_config, config.mongo_load, config.mongo_field)
        lock.unlink()


def _write_back(folder: Path, source: Source) -> None:
    server, shards = open_server(source.address), _shards(folder)
    steps: list[Step] = [(path.name, partial(_write_shard, server, source.name, path)) for _, path in shards]
    steps.append(("dropped", partial(_empty_dropped, server, source, [path for _, path in shards])))
    _do(folder, f"write back to {source.name} ({server.database})", steps, partial(check_to_write, server))
    server.close()


def _write_shard(server: Server, name: str, path: Path) -> dict[str, int]:
    found = (document for document in read_documents(path) if document.source == name)
    counts = write_texts(server, ((*place_in(server, document.id), document.text) for document in found))
    return {"written": counts["documents"] - counts["missing"], "gone": counts["missing"], "changed": counts["changed"]}


def _empty_dropped(server: Server, source: Source, shards: Sequence[Path]) -> dict[str, int]:
    """Nothing is left of a document that was dropped: an empty text tells that from one that was never cleaned."""
    kept = {one.collection: np.zeros(one.size, np.bool_) for one in source.bounds}
    for path in shards:
        for name, place in read_places(path):
            if name == source.name:
                collection, idx = place_in(server, place)
                kept[collection][idx] = True
    dropped = ((name, int(idx), "") for name, mask in kept.items() for idx in np.flatnonzero(~mask))
    counts = write_texts(server, dropped)
    return {"emptied": counts["documents"] - counts["missing"], "changed": counts["changed"]}


def _load(folder: Path, path: str, collection: str, field: str) -> None:
    server, manifest = open_server(path), open_manifest(folder)
    steps: list[Step] = []
    start = partial(
        reserve,
        server,
        collection,
        {"corpus": manifest["fingerprint"], "field": field, "documents": manifest["documents"]},
    )
    before = 0
    for split, shard in _shards(folder):
        steps.append((shard.name, partial(_load_shard, server, collection, field, split, shard, start, before)))
        before += count_documents(shard)
    steps.append(("meta_info", partial(_settle, server, collection)))
    _do(
        folder,
        f"load into {collection} of {path} ({server.database}, {field})",
        steps,
        partial(check_to_load, server, collection),
    )
    server.close()


def _load_shard(
    server: Server, collection: str, field: str, split: str, shard: Path, start: Callable[[], int], before: int
) -> dict[str, int]:
    new = insert_rows(server, collection, _rows(shard, split, field), start() + before, field)
    return {"loaded": count_documents(shard), "changed": new}


def _settle(server: Server, collection: str) -> dict[str, int]:
    set_count(server, collection)
    return {"changed": 0}


def _rows(shard: Path, split: str, field: str) -> Iterator[dict[str, Any]]:
    for document in read_documents(shard):
        meta = {"meta": json.loads(document.meta)} if document.meta else {}
        yield {field: document.text, "split": split, "source": document.source, "place": document.id, **meta}


def _shards(folder: Path) -> list[tuple[str, Path]]:
    return [(split, path) for split in SPLITS for path in shards_of(folder, split)]


def _do(folder: Path, task: str, steps: Sequence[Step], check: Callable[[], None]) -> None:
    """Do the steps that the notes beside the corpus do not have yet, and note each."""
    path, fingerprint = folder / NOTES, open_manifest(folder)["fingerprint"]
    notes = read_json(path) if path.is_file() else {}
    if notes.get("corpus") != fingerprint:
        notes = {"corpus": fingerprint, "tasks": {}}
    known = notes["tasks"].setdefault(task, {})
    todo = [step for step in steps if step[0] not in known]
    changed = 0
    if todo:
        check()
        with progress(f"prepare: {task}", total=len(todo), unit="shards") as bar:
            for name, work in todo:
                counts = work()
                changed += counts.pop("changed")
                known[name] = counts
                write_json(path, notes)
                bar.advance(1)
    total: Counter[str] = Counter()
    for counts in known.values():
        total.update(counts)
    told = ", ".join(f"{number:,} {what}" for what, number in total.items())
    print(
        f"prepare: {task}: {f'{told}; {changed:,} changed now' if todo else f'done already ({told}); see {shown(path)}'}"
    )
