"""Read plain text; a document is a section, a block between blank lines, a line, or the file."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import (
    RAW_BYTES,
    BadRecord,
    UnreadableRecord,
    check_line_length,
    decode_utf8,
    describe_encoding_error,
    read_lines,
)
from textmill.corpus.source import ChunkRange, Source, SourceChunk
from textmill.corpus.sources import line_ranges
from textmill.corpus.streams import open_stream

MAX_BLOCK_CHARACTERS = 8 << 20
"""A block between blank lines is cut after this many characters."""

# CR LF is one newline: the atomic group never splits it.
_NEWLINE = r"(?>\r\n|[\r\n])"
_LINE_END = re.compile(_NEWLINE)
_BLANK_LINE = re.compile(rf"{_NEWLINE}[ \t]*+{_NEWLINE}")
_LEADING = re.compile(rf"(?:[ \t]*+{_NEWLINE})*+")


def ranges(source: Source, document_unit: str) -> Iterator[ChunkRange] | None:
    """Ranges of complete lines if each line is a document; otherwise the file is not split."""
    return line_ranges(source) if document_unit == "line" else None


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
            yield BadRecord(name, place, str(error)[:RAW_BYTES], line[:RAW_BYTES], length)


def _file_record(chunk: SourceChunk) -> Document | BadRecord:
    name, blocks, size = chunk.source.name, [], 0
    with open_stream(chunk.source) as stream:
        while size <= records.MAX_RECORD_BYTES and (block := stream.read1(records.READ_BYTES)):
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
    size = config.section_chars
    limits = (
        (size, 2 * size, 4 * size)
        if config.documents == "section"
        else (1, MAX_BLOCK_CHARACTERS, 2 * MAX_BLOCK_CHARACTERS)
    )
    with open_stream(chunk.source) as stream:
        for number, text in enumerate(split_text(stream, *limits), 1):
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


def split_text(stream: io.BufferedReader, size: int, soft_limit: int, hard_limit: int) -> Iterator[str]:
    """Yield a stream's text in documents of about `size` characters; `_find_cut` decides where they end.

    Bytes that are not UTF-8 become lone surrogates, so that they spoil only their own document.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, start, at_end, carriage_return = "", 0, False, b""
    if stream.peek(3)[:3] == codecs.BOM_UTF8:
        stream.read(3)
    while True:
        start = _LEADING.match(text, start).end()  # type: ignore[union-attr]
        end = _find_cut(text, start, size, soft_limit, hard_limit, at_end)
        if end is not None:
            if end > start and not text[start:end].isspace():
                yield text[start:end]
            start = end
        elif not at_end:
            text, start = text[start:], 0
            new_bytes = stream.read1(max(records.READ_BYTES, len(text)))
            at_end = not new_bytes
            new_bytes = carriage_return + new_bytes
            # Hold back a final CR: a cut must not depend on where a block of the file ends.
            carriage_return = b"\r" if new_bytes.endswith(b"\r") and not at_end else b""
            text += decoder.decode(new_bytes[: len(new_bytes) - len(carriage_return)], final=at_end)
        else:
            return


def _find_cut(text: str, start: int, size: int, soft_limit: int, hard_limit: int, at_end: bool) -> int | None:
    """Where the document at `start` ends; None if more text is needed to decide.

    It ends at the first blank line after `size` characters, else at the first line end after `soft_limit`, else at
    `hard_limit`. Only the text up to that point matters.
    """
    if found := _BLANK_LINE.search(text, start + size - 1, start + soft_limit):
        return found.end()
    if len(text) - start >= soft_limit:
        if found := _LINE_END.search(text, start + soft_limit - 1, start + hard_limit):
            return found.end()
        if len(text) - start >= hard_limit:
            return start + hard_limit
    return len(text) if at_end and len(text) > start else None
