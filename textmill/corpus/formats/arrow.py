"""Read Arrow files as Hugging Face `datasets` writes them; one record per row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.formats.parquet import batch_records
from textmill.corpus.records import BadRecord
from textmill.corpus.source import Source, SourceChunk
from textmill.corpus.streams import BrokenStream, open_seekable
from textmill.corpus.text_fields import parse_text_key
from textmill.storage.remote_folders import first_line

MAGIC = b"ARROW1"
"""The first bytes of the Arrow file format; other files are read as the stream format."""


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the rows of all batches."""
    fields = parse_text_key(chunk.source, config)
    row = 0
    with open_seekable(chunk.source.address) as stream:
        for batch in _batches(stream):
            names = batch.schema.names
            yield from batch_records(
                batch.select(fields.columns(names)) if fields.columns(names) else batch, fields, row, names
            )
            row += batch.num_rows
            if chunk.source.part and stream.tell() >= chunk.source.part[1]:
                return


def sample_rows(source: Source, count: int) -> list[dict[str, Any]]:
    """The first rows of a file, with all columns."""
    with open_seekable(source.address) as stream:
        batch = next(_batches(stream), None)
        return batch.slice(0, count).to_pylist() if batch is not None else []


def _batches(stream: Any) -> Iterator[Any]:
    try:
        head = stream.read(len(MAGIC))
        stream.seek(0)
        if not head:
            return
        if head == MAGIC:
            with pa.ipc.open_file(stream) as file:
                for number in range(file.num_record_batches):
                    yield file.get_batch(number)
        else:
            with pa.ipc.open_stream(stream) as batches:
                yield from batches
    except (pa.ArrowException, OSError) as error:
        raise BrokenStream(f"invalid or incomplete Arrow file: {first_line(error)}") from None
