"""Export a finished corpus to MongoDB: write cleaned text back, and load kept documents into a collection.

Each shard is an idempotent step that is recorded when it is finished. After a kill, the next run continues there.
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
    check_writable,
    ensure_loadable,
    insert_rows,
    parse_place,
    reserve_idx_range,
    update_document_count,
    write_texts,
)
from textmill.corpus.shards import count_documents, list_shards, read_documents, read_places
from textmill.corpus.source import Source
from textmill.errors import TextmillError
from textmill.storage.files import file_lock, format_path, read_json, write_json
from textmill.storage.progress import progress
from textmill.storage.stages import open_manifest

PROGRESS_FILE = "mongo.json"
"""Lists the finished steps; stored in the corpus folder."""
ExportStep = tuple[str, Callable[[], dict[str, int]]]
"""A name and a function that returns its counts; only `changed` may differ when a step is repeated."""


def check_export(config: CorpusConfig, sources: Sequence[Source]) -> None:
    """Raise an error before any work if the export is not possible."""
    indexes = [source for source in sources if source.format == "mongo"]
    if config.mongo_write_back:
        if not indexes:
            raise TextmillError(
                "corpus.mongo_write_back: no MongoDB source; add mongo:db_config.json to corpus.sources"
            )
        for source in indexes:
            if source.text_key == "filt_text":
                raise TextmillError(
                    f"corpus.mongo_write_back: would overwrite filt_text, which {source.name} is read from; "
                    f"read another field, such as form"
                )
        for source in indexes:
            server = open_server(source.address)
            check_writable(server)
            server.close()
    if config.mongo_load and config.mongo_config:
        target = open_server(config.mongo_config)
        for source in indexes:
            server = open_server(source.address)
            same_database = (server.address, server.database) == (target.address, target.database)
            if same_database and config.mongo_load in server.collections:
                raise TextmillError(
                    f"corpus.mongo_load: '{config.mongo_load}' is also a source; load into another collection"
                )
        ensure_loadable(target, config.mongo_load)
        target.close()


def export_to_mongo(config: CorpusConfig, folder: Path, sources: Sequence[Source]) -> None:
    """Run the configured exports that are not finished, and print the counts."""
    lock = folder.with_name(folder.name + ".mongo.lock")
    with file_lock(lock, f"{folder}: another textmill process is exporting it to MongoDB; wait until it has finished"):
        if config.mongo_write_back:
            for source in sources:
                if source.format == "mongo":
                    _write_back(folder, source)
        if config.mongo_load and config.mongo_config:
            _load(folder, config.mongo_config, config.mongo_load, config.mongo_field)
        lock.unlink()


def _write_back(folder: Path, source: Source) -> None:
    server, shards = open_server(source.address), _shards(folder)
    steps: list[ExportStep] = [(path.name, partial(_write_shard, server, source.name, path)) for _, path in shards]
    steps.append(("dropped", partial(_empty_dropped, server, source, [path for _, path in shards])))
    _run_steps(folder, f"write back to {source.name} ({server.database})", steps, partial(check_writable, server))
    server.close()


def _write_shard(server: Server, name: str, path: Path) -> dict[str, int]:
    found = (document for document in read_documents(path) if document.source == name)
    counts = write_texts(server, ((*parse_place(server, document.id), document.text) for document in found))
    return {"written": counts["documents"] - counts["missing"], "gone": counts["missing"], "changed": counts["changed"]}


def _empty_dropped(server: Server, source: Source, shards: Sequence[Path]) -> dict[str, int]:
    """Set the text of dropped documents to '', which tells them from documents that were never cleaned."""
    kept = {
        collection_range.collection: np.zeros(collection_range.size, np.bool_)
        for collection_range in source.collection_ranges
    }
    for path in shards:
        for name, place in read_places(path):
            if name == source.name:
                collection, idx = parse_place(server, place)
                kept[collection][idx] = True
    dropped = ((name, int(idx), "") for name, mask in kept.items() for idx in np.flatnonzero(~mask))
    counts = write_texts(server, dropped)
    return {"emptied": counts["documents"] - counts["missing"], "changed": counts["changed"]}


def _load(folder: Path, path: str, collection: str, field: str) -> None:
    server, manifest = open_server(path), open_manifest(folder, "prepare")
    steps: list[ExportStep] = []
    start = partial(
        reserve_idx_range,
        server,
        collection,
        {"corpus": manifest["fingerprint"], "field": field, "documents": manifest["documents"]},
    )
    first_number = 0
    for split, shard in _shards(folder):
        steps.append((shard.name, partial(_load_shard, server, collection, field, split, shard, start, first_number)))
        first_number += count_documents(shard)
    steps.append(("meta_info", partial(_finish_load, server, collection)))
    _run_steps(
        folder,
        f"load into {collection} of {path} ({server.database}, {field})",
        steps,
        partial(ensure_loadable, server, collection),
    )
    server.close()


def _load_shard(
    server: Server, collection: str, field: str, split: str, shard: Path, start: Callable[[], int], first_number: int
) -> dict[str, int]:
    new = insert_rows(server, collection, _rows(shard, split, field), start() + first_number, field)
    return {"loaded": count_documents(shard), "changed": new}


def _finish_load(server: Server, collection: str) -> dict[str, int]:
    update_document_count(server, collection)
    return {"changed": 0}


def _rows(shard: Path, split: str, field: str) -> Iterator[dict[str, Any]]:
    for document in read_documents(shard):
        meta = {"meta": json.loads(document.meta)} if document.meta else {}
        yield {field: document.text, "split": split, "source": document.source, "place": document.id, **meta}


def _shards(folder: Path) -> list[tuple[str, Path]]:
    return [(split, path) for split in SPLITS for path in list_shards(folder, split)]


def _run_steps(folder: Path, task: str, steps: Sequence[ExportStep], check: Callable[[], None]) -> None:
    """Run the steps that the progress file does not list, and record each one."""
    path, fingerprint = folder / PROGRESS_FILE, open_manifest(folder)["fingerprint"]
    progress_notes = read_json(path) if path.is_file() else {}
    if progress_notes.get("corpus") != fingerprint:
        progress_notes = {"corpus": fingerprint, "tasks": {}}
    done_steps = progress_notes["tasks"].setdefault(task, {})
    pending = [step for step in steps if step[0] not in done_steps]
    changed = 0
    if pending:
        check()
        with progress(f"prepare: {task}", total=len(pending), unit="shards") as bar:
            for name, work in pending:
                counts = work()
                changed += counts.pop("changed")
                done_steps[name] = counts
                write_json(path, progress_notes)
                bar.advance(1)
    total: Counter[str] = Counter()
    for counts in done_steps.values():
        total.update(counts)
    summary = ", ".join(f"{number:,} {what}" for what, number in total.items())
    outcome = f"{summary}; {changed:,} changed now" if pending else f"done already ({summary}); see {format_path(path)}"
    print(f"prepare: {task}: {outcome}")
