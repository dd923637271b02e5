"""Read plain text; a document is a section, a block between blank lines, a line, or the file."""

from __future__ import annotations

from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import READ_BYTES, Document, limits_of, read_sections
from textmill.corpus.records import (
    BadRecord,
    UnreadableRecord,
    check_line_length,
    check_utf8,
    decode_utf8,
    line_ranges,
    read_lines,
)
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.streams import open_stream


def ranges(source: Source, document_unit: str, chunk_bytes: int) -> Iterator[ChunkRange] | None:
    """Ranges of complete lines if each line is a document; otherwise the file is not split."""
    return line_ranges(source, chunk_bytes) if document_unit == "line" else None


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield the documents as `corpus.documents` defines them."""
    if config.documents == "line":
        yield from _line_records(chunk)
    elif config.documents == "file":
        yield _file_record(chunk)
    else:
        yield from _segment_records(chunk, config)


def _line_records(chunk: SourceChunk) -> Iterator[Document | BadRecord]:
    name = chunk.source.name
    for number, line, length in read_lines(chunk):
        place = f"line {number}"
        try:
            check_line_length(length)
            text = decode_utf8(line)
            yield Document(text[: -1 - text.endswith("\r\n")] if text.endswith("\n") else text, name, place)
        except UnreadableRecord as error:
            yield BadRecord(name, place, str(error), line, length)


def _file_record(chunk: SourceChunk) -> Document | BadRecord:
    name = chunk.source.name
    blocks = []
    size = 0
    with open_stream(chunk.source) as stream:
        while size <= records.MAX_RECORD_BYTES and (block := stream.read1(READ_BYTES)):
            blocks.append(block)
            size += len(block)
    raw = b"".join(blocks)
    try:
        if size > records.MAX_RECORD_BYTES:
            raise UnreadableRecord(
                f"the file has more than {records.MAX_RECORD_BYTES:,} bytes; set corpus.documents=section"
            )
        return Document(decode_utf8(raw), name, "file")
    except UnreadableRecord as error:
        return BadRecord(name, "file", str(error), raw, len(raw))


def _segment_records(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    limits = limits_of(config.documents, config.section_chars)
    with open_stream(chunk.source) as stream:
        for number, text in enumerate(read_sections(stream, limits), 1):
            yield _segment_record(text, chunk.source.name, f"{config.documents} {number}")


def _segment_record(text: str, name: str, place: str) -> Document | BadRecord:
    try:
        check_utf8(text)
        if text.startswith("\0") and not text.strip("\0\r\n"):
            raise UnreadableRecord("nothing but NUL bytes")
    except UnreadableRecord as error:
        raw = text.encode(errors="surrogateescape")
        return BadRecord(name, place, str(error), raw, len(raw))
    return Document(text, name, place)
