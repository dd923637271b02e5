"""Read MongoDB collections as one source, in ranges of positions."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import BadRecord
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.errors import TextmillError

DOCUMENTS_PER_CHUNK = 100_000
"""Positions in a chunk."""
PREFIX = "mongo:"


def find_mongo_sources(entry: str) -> list[Source]:
    """The source of a `mongo:` entry.

    It records the current ranges of the collections; documents that are added later are not read.
    """
    source = Source(entry, os.path.expanduser(entry.removeprefix(PREFIX)), "mongo")
    index = _import_mongo(source, "collections").open_index(source.address)
    index.close()
    return [replace(source, collection_ranges=index.collection_ranges)]


def ranges(source: Source, document_unit: str) -> Iterator[ChunkRange]:
    """Ranges of positions."""
    size = _size(source)
    yield from (
        (start, min(start + DOCUMENTS_PER_CHUNK, size), start) for start in range(0, max(size, 1), DOCUMENTS_PER_CHUNK)
    )


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the documents of a range of positions."""
    source = chunk.source
    yield from _import_mongo(source, "collections").read_range(
        source.address, chunk.start, chunk.stop, config, source.collection_ranges, source.text_key
    )


def collection_state(source: Source) -> tuple[int, str]:
    """The number of positions and a fingerprint of their content."""
    snapshot = _import_mongo(source, "snapshot")
    server = import_module("textmill.corpus.mongo.server").open_server(source.address)
    try:
        return _size(source), snapshot.fingerprint_collections(server, source.collection_ranges, source.read_original)
    finally:
        server.close()


def _size(source: Source) -> int:
    return sum(collection_range.size for collection_range in source.collection_ranges)


def _import_mongo(source: Source, name: str) -> Any:
    try:
        return import_module(f"textmill.corpus.mongo.{name}")
    except ImportError as error:
        raise TextmillError(f"'{source.name}' needs pymongo ({error}); run: pip install 'textmill[mongo]'") from None
