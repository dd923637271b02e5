"""MongoDB collections as one index, read in ranges of documents."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import Bad
from textmill.corpus.source import Piece, Range, Source
from textmill.errors import TextmillError

DOCUMENTS = 100_000
"""Documents of a piece."""
PREFIX = "mongo:"


def sources_of(word: str) -> list[Source]:
    """The index that a word names, with its bounds as they are now: what is added later moves nothing and is not read."""
    source = Source(word, os.path.expanduser(word.removeprefix(PREFIX)), "mongo")
    index = _module(source, "collections").open_index(source.address)
    index.close()
    return [replace(source, bounds=index.bounds)]


def ranges(source: Source, documents: str) -> Iterator[Range]:
    """Ranges of the index."""
    size = _size(source)
    yield from ((start, min(start + DOCUMENTS, size), start) for start in range(0, max(size, 1), DOCUMENTS))


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """The documents of a range."""
    source = piece.source
    yield from _module(source, "collections").read_range(
        source.address, piece.start, piece.stop, config, source.bounds, source.text_key
    )


def state_of(source: Source) -> tuple[int, str]:
    """The number of positions, and a mark of what stands there."""
    bounds = _module(source, "snapshot")
    server = import_module("textmill.corpus.mongo.server").open_server(source.address)
    try:
        return _size(source), bounds.mark_of(server, source.bounds, source.raw)
    finally:
        server.close()


def _size(source: Source) -> int:
    return sum(one.size for one in source.bounds)


def _module(source: Source, name: str) -> Any:
    try:
        return import_module(f"textmill.corpus.mongo.{name}")
    except ImportError as error:
        raise TextmillError(
            f"corpus.sources: '{source.name}' needs pymongo ({error}); run: pip install 'textmill[mongo]'"
        ) from None
