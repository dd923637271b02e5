"""Read Parquet files in batches, one record per row; a file is split between row groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.records import BadRecord
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.streams import BrokenStream, open_seekable
from textmill.corpus.text_fields import TextFields, parse_text_key
from textmill.storage.remote_folders import first_line

BATCH_ROWS = 1024


def ranges(source: Source, document_unit: str, chunk_bytes: int) -> Iterator[ChunkRange] | None:
    """Ranges of row groups of about `chunk_bytes` each; None if the file is damaged."""
    try:
        with _open(source) as file:
            return iter(_row_group_ranges(file.metadata, chunk_bytes))
    except BrokenStream:
        return None


def _row_group_ranges(metadata: Any, chunk_bytes: int) -> list[ChunkRange]:
    """Bytes are counted through the row groups' uncompressed data: a row group belongs to the range where it ends."""
    ranges_found: list[ChunkRange] = []
    start = first_row = end = end_row = 0
    for group in range(metadata.num_row_groups):
        end += metadata.row_group(group).total_byte_size
        end_row += metadata.row_group(group).num_rows
        if end - start >= chunk_bytes or group == metadata.num_row_groups - 1:
            ranges_found.append((start, end, first_row))
            start = end
            first_row = end_row
    return ranges_found or [(0, 0, 0)]


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the rows of a chunk's row groups; a damaged group becomes one bad record."""
    fields = parse_text_key(chunk.source, config)
    with _open(chunk.source) as file:
        columns = fields.columns(file.schema_arrow.names)
        end = end_row = 0
        for group in range(file.num_row_groups):
            group_metadata = file.metadata.row_group(group)
            next_row = end_row
            end += group_metadata.total_byte_size
            end_row += group_metadata.num_rows
            if not chunk.is_entire_source and not chunk.start < end <= chunk.stop:
                continue
            try:
                for batch in file.iter_batches(
                    batch_size=BATCH_ROWS, row_groups=[group], columns=columns or None, use_threads=False
                ):
                    yield from batch_records(batch, fields, next_row, file.schema_arrow.names)
                    next_row += batch.num_rows
                if next_row < end_row:  # pyarrow ends where the shortest column does
                    raise OSError("a column has fewer rows")
            except (pa.ArrowException, OSError) as error:
                reason = f"damaged from here to row {end_row}: {first_line(error)}"
                lost = group_metadata.total_byte_size * (end_row - next_row) // max(group_metadata.num_rows, 1)
                yield BadRecord(chunk.source.name, f"row {next_row}", reason, b"", lost)


def sample_rows(source: Source, count: int) -> list[dict[str, Any]]:
    """The first rows of a file, with all columns."""
    with _open(source) as file:
        batch = next(file.iter_batches(batch_size=count, use_threads=False), None)
        return [row for row in _rows(batch) if isinstance(row, dict)] if batch is not None else []


def batch_records(batch: Any, fields: TextFields, first: int, names: list[str]) -> Iterator[Document | BadRecord]:
    """Yield one record per row; without the text column, every row is a bad record, so that each is counted.

    `first` is the number of the first row in its file, `names` are the file's columns.
    """
    found = fields.columns(names)
    if not found or (not fields.chat and not set(found) & _text_columns(fields)):
        reason = _describe_missing_column(batch.schema, fields, names)
        yield from (BadRecord(fields.source, f"row {first + index}", reason, b"") for index in range(batch.num_rows))
        return
    for index, row in enumerate(_rows(batch)):
        place = f"row {first + index}"
        if isinstance(row, str):
            yield BadRecord(fields.source, place, row, b"")
        else:
            yield from fields.documents(row, place)


def _describe_missing_column(schema: Any, fields: TextFields, names: list[str]) -> str:
    texts = [item.name for item in schema if pa.types.is_string(item.type) or pa.types.is_large_string(item.type)]
    advice = f"; set corpus.text_key={texts[0]}" if texts else ""
    return f"no column '{fields.key}'; found {names[:12]}{advice}"


def _text_columns(fields: TextFields) -> set[str]:
    """The names of columns that may hold the text: of a path a.b, `a.b` and `a`."""
    paths = [fields.list_paths[0]] if fields.list_paths else list(fields.text_paths)
    return {fields.key} | {name for path in paths if path for name in (".".join(path), path[0])}


def _rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """The rows; a row that cannot be read is the reason, as text."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:  # one invalid string fails the whole batch; reading row by row loses only its own row
        for index in range(batch.num_rows):
            try:
                yield batch.slice(index, 1).to_pylist()[0]
            except UnicodeDecodeError as error:
                yield f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start:,}"


@contextmanager
def _open(source: Source) -> Iterator[Any]:
    stream = open_seekable(source.address)
    try:
        try:
            file = pq.ParquetFile(stream, page_checksum_verification=True)
        except (pa.ArrowException, OSError) as error:
            raise BrokenStream(f"invalid or incomplete Parquet file: {first_line(error)}") from None
        with file:
            yield file
    finally:
        stream.close()
