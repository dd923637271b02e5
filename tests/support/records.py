"""Records of files, read as `prepare` reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.records import BadRecord

Records = list[Document | BadRecord]


def read_file(path: Path, data: bytes | str | None = None, **settings: Any) -> Records:
    """The records of a file, which is written first if there is `data`."""
    if data is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return read_sources([str(path)], **settings)


def read_sources(entries: list[str], **settings: Any) -> Records:
    """The records of entries of `corpus.sources`."""
    config = CorpusConfig(**settings)
    chunks = split_into_chunks(find_sources(entries, encoding=config.encoding), config.documents)
    return [record for chunk in chunks for record in read_records(chunk, config)]


def documents_of(found: Records) -> list[Document]:
    """The records, none of which is a bad one."""
    assert not [record for record in found if isinstance(record, BadRecord)], found
    return [record for record in found if isinstance(record, Document)]


def texts_of(found: Records) -> list[str]:
    """Their texts."""
    return [document.text for document in documents_of(found)]
