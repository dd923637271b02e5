"""Read plain text; a document is a section, a block between blank lines, a line, or the file."""

from __future__ import annotations

from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import READ_BYTES, Document, SectionLimits, read_sections, section_limits
from textmill.corpus.records import (
    RAW_BYTES,
    BadRecord,
    UnreadableRecord,
    check_line_length,
    decode_utf8,
    describe_encoding_error,
    line_ranges,
    read_lines,
)
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.streams import open_stream

MAX_BLOCK_CHARACTERS = 8 << 20
"""A block between blank lines is cut after this many characters."""


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


def segment_limits(config: CorpusConfig) -> SectionLimits:
    """The limits of sections, or of blocks between blank lines."""
    if config.documents == "section":
        return section_limits(config.section_chars)
    return 1, MAX_BLOCK_CHARACTERS, 2 * MAX_BLOCK_CHARACTERS


def _line_records(chunk: SourceChunk) -> Iterator[Document | BadRecord]:
    name = chunk.source.name
    for number, line, length in read_lines(chunk):
        place = f"line {number}"
        try:
            check_line_length(length)
            text = decode_utf8(line)
            yield Document(text[: -1 - text.endswith("\r\n")] if text.endswith("\n") else text, name, place)
        except UnreadableRecord as error:
            yield BadRecord(name, place, str(error)[:RAW_BYTES], line[:RAW_BYTES], length)


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
        return BadRecord(name, "file", str(error), raw[:RAW_BYTES], len(raw))


def _segment_records(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    with open_stream(chunk.source) as stream:
        for number, text in enumerate(read_sections(stream, segment_limits(config)), 1):
            yield _segment_record(text, chunk.source.name, f"{config.documents} {number}")


def _segment_record(text: str, name: str, place: str) -> Document | BadRecord:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raw = text.encode(errors="surrogateescape")
        return BadRecord(
            name,
            place,
            describe_encoding_error(raw, ord(text[error.start]) & 0xFF, len(text[: error.start].encode())),
            raw[:RAW_BYTES],
            len(raw),
        )
    if text.startswith("\0") and not text.strip("\0\r\n"):
        return BadRecord(name, place, "nothing but NUL bytes", text[:RAW_BYTES].encode(), len(text))
    return Document(text, name, place)
