"""Export a finished corpus to MongoDB: write cleaned text back, and load kept documents into a collection.

Each shard is an idempotent step that is recorded when it is finished. After a kill, the next run continues there.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from textmill.config import CorpusConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.mongo.server import MongoServer, open_server
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


class ExportStep(NamedTuple):
    """A part of an export that can be repeated: a shard, or what follows the last one."""

    name: str
    run: Callable[[], dict[str, int]]
    """Returns the counts of the step; only `changed` may differ when it is repeated."""


def check_export(config: CorpusConfig, sources: Sequence[Source]) -> None:
    """Raise an error before any work if the export is not possible."""
    mongo_sources = [source for source in sources if source.format == "mongo"]
    if config.mongo_write_back:
        _check_write_back(mongo_sources)
    if config.mongo_load and config.mongo_config:
        _check_load(config.mongo_config, config.mongo_load, mongo_sources)


def _check_write_back(mongo_sources: Sequence[Source]) -> None:
    if not mongo_sources:
        raise TextmillError("corpus.mongo_write_back: no MongoDB source; add mongo:db_config.json to corpus.sources")
    for source in mongo_sources:
        if source.text_key == "filt_text":
            raise TextmillError(
                f"corpus.mongo_write_back: would overwrite filt_text, which {source.name} is read from; "
                f"read another field, such as form"
            )
    for source in mongo_sources:
        server = open_server(source.address)
        check_writable(server)
        server.close()


def _check_load(path: str, collection: str, mongo_sources: Sequence[Source]) -> None:
    target = open_server(path)
    for source in mongo_sources:
        server = open_server(source.address)
        same_database = (server.address, server.database) == (target.address, target.database)
        if same_database and collection in server.collections:
            raise TextmillError(f"corpus.mongo_load: '{collection}' is also a source; load into another collection")
    ensure_loadable(target, collection)
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
    """Write the cleaned text of each document back to the MongoDB document that it came from."""
    server = open_server(source.address)
    paths = [path for _, path in _shards(folder)]
    steps = [ExportStep(path.name, partial(_write_shard, server, source.name, path)) for path in paths]
    steps.append(ExportStep("dropped", partial(_empty_dropped, server, source, paths)))
    _run_steps(folder, f"write back to {source.name} ({server.database})", steps, partial(check_writable, server))
    server.close()


def _write_shard(server: MongoServer, source_name: str, path: Path) -> dict[str, int]:
    documents = (document for document in read_documents(path) if document.source == source_name)
    counts = write_texts(server, ((*parse_place(server, document.id), document.text) for document in documents))
    return {"written": counts["documents"] - counts["missing"], "gone": counts["missing"], "changed": counts["changed"]}


def _empty_dropped(server: MongoServer, source: Source, paths: Sequence[Path]) -> dict[str, int]:
    """Set the text of dropped documents to '', which tells them from documents that were never cleaned."""
    is_kept = {collection: np.zeros(size, np.bool_) for collection, _, size in source.collection_ranges}
    for path in paths:
        for source_name, place in read_places(path):
            if source_name == source.name:
                collection, idx = parse_place(server, place)
                is_kept[collection][idx] = True
    dropped = ((collection, int(idx), "") for collection, kept in is_kept.items() for idx in np.flatnonzero(~kept))
    counts = write_texts(server, dropped)
    return {"emptied": counts["documents"] - counts["missing"], "changed": counts["changed"]}


def _load(folder: Path, path: str, collection: str, field: str) -> None:
    """Load the kept documents of all sources into a collection."""
    server = open_server(path)
    manifest = open_manifest(folder, "prepare")
    load_record = {"corpus": manifest["fingerprint"], "field": field, "documents": manifest["documents"]}
    load = CorpusLoad(server, collection, field, load_record)
    steps = []
    documents_before = 0
    for split, shard in _shards(folder):
        steps.append(ExportStep(shard.name, partial(load.load_shard, shard, split, documents_before)))
        documents_before += count_documents(shard)
    steps.append(ExportStep("meta_info", load.finish))
    task = f"load into {collection} of {path} ({server.database}, {field})"
    _run_steps(folder, task, steps, partial(ensure_loadable, server, collection))
    server.close()


@dataclass(frozen=True)
class CorpusLoad:
    """A load of a corpus into one range of idx of a collection."""

    server: MongoServer
    collection: str
    field: str
    """The field for the text."""
    load_record: dict[str, Any]
    """What identifies this load in meta_info; see `reserve_idx_range`."""

    def load_shard(self, shard: Path, split: str, documents_before: int) -> dict[str, int]:
        """Insert the documents of a shard; `documents_before` are in earlier shards."""
        first = reserve_idx_range(self.server, self.collection, self.load_record) + documents_before
        new = insert_rows(self.server, self.collection, self._rows(shard, split), first, self.field)
        return {"loaded": count_documents(shard), "changed": new}

    def finish(self) -> dict[str, int]:
        """Record the number of documents in meta_info."""
        update_document_count(self.server, self.collection)
        return {"changed": 0}

    def _rows(self, shard: Path, split: str) -> Iterator[dict[str, Any]]:
        for document in read_documents(shard):
            meta = {"meta": json.loads(document.meta)} if document.meta else {}
            yield {self.field: document.text, "split": split, "source": document.source, "place": document.id, **meta}


def _shards(folder: Path) -> list[tuple[str, Path]]:
    """(split, path) of all shards."""
    return [(split, path) for split in SPLITS for path in list_shards(folder, split)]


def _run_steps(folder: Path, task: str, steps: Sequence[ExportStep], check: Callable[[], None]) -> None:
    """Run the steps that the progress file does not list, record each one, and print the counts.

    The file after the first of two shards: {"corpus": FINGERPRINT, "tasks": {TASK: {SHARD: {"loaded": 1000}}}}.
    """
    path = folder / PROGRESS_FILE
    fingerprint = open_manifest(folder)["fingerprint"]
    progress_record = read_json(path) if path.is_file() else {}
    if progress_record.get("corpus") != fingerprint:
        progress_record = {"corpus": fingerprint, "tasks": {}}
    counts_by_step = progress_record["tasks"].setdefault(task, {})
    pending = [step for step in steps if step.name not in counts_by_step]
    changed = 0
    if pending:
        check()
        with progress(f"prepare: {task}", total=len(pending), unit="shards") as bar:
            for step in pending:
                counts = step.run()
                changed += counts.pop("changed")
                counts_by_step[step.name] = counts
                write_json(path, progress_record)
                bar.advance(1)
    totals: Counter[str] = Counter()
    for counts in counts_by_step.values():
        totals.update(counts)
    summary = ", ".join(f"{total:,} {name}" for name, total in totals.items())
    outcome = f"{summary}; {changed:,} changed now" if pending else f"done already ({summary}); see {format_path(path)}"
    print(f"prepare: {task}: {outcome}")
