"""Read source code; `meta` keeps the language and the path of each file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.document_files import decode_text, read_document
from textmill.corpus.records import BadRecord
from textmill.corpus.source import CODE, COMPRESSIONS, SourceChunk


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the parts of the file."""
    path = chunk.source.name
    end = next((end for end in COMPRESSIONS if path.lower().endswith(end)), "")
    language = CODE.get(os.path.splitext(path[: len(path) - len(end)])[1].lower(), "")
    return read_document(chunk, config, json.dumps({"language": language, "path": path}, ensure_ascii=False))


def extract(raw: bytes, encoding: str) -> str:
    """The file as it is."""
    return decode_text(raw, encoding)
