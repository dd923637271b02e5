"""MongoDB collections as one index, read in ranges of documents."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import Bad
from textmill.corpus.sources import Piece, Range, Source
from textmill.errors import TextmillError

DOCUMENTS = 100_000
"""Documents of a piece."""


def ranges(source: Source, documents: str) -> Iterator[Range]:
    """Ranges of the index."""
    size = count(source)
    yield from ((start, min(start + DOCUMENTS, size), start) for start in range(0, max(size, 1), DOCUMENTS))


def read(piece: Piece, config: CorpusConfig) -> Iterator[Document | Bad]:
    """The documents of a range."""
    yield from _mongo(piece.source).read_range(piece.source.address, piece.start, piece.stop, config)


def count(source: Source) -> int:
    """How many documents the index has."""
    return len(_mongo(source).open_index(source.address))


def _mongo(source: Source) -> Any:
    try:
        return import_module("textmill.corpus.mongo")
    except ImportError as error:
        raise TextmillError(f"corpus.sources: '{source.name}' needs pymongo ({error}); run: pip install 'textmill[mongo]'") from None
