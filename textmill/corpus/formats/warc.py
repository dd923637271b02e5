"""Read WARC and WET files of web crawls: the main text of each page, or its text as the crawler stored it.

A record is a header and so many bytes, which a few lines read from any stream; warcio and FastWARC want files of their
own. HTTP, chunks and digests are read here too, so that a flipped bit is found.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from http.client import parse_headers
from typing import NamedTuple

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import READ_BYTES, Document
from textmill.corpus.document_files import decode_text
from textmill.corpus.formats.html import extract_page
from textmill.corpus.records import BadRecord, UnreadableRecord
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import BrokenStream, open_source
from textmill.corpus.text_fields import parse_text_key

_VERSION = re.compile(rb"WARC/[01]\.\d+\s*")
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_MAX_CHUNK_LINE = 1 << 10


class _Record(NamedTuple):
    number: int
    headers: dict[str, str]
    content: bytes


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield pages with the fields text, url and date. Requests, images and other records without text are no records
    here."""
    fields = parse_text_key(chunk.source, config, kept_fields=("url",))
    with open_source(chunk.source) as stream:
        for found in _read_records(stream, chunk.source.name):
            if isinstance(found, BadRecord):
                yield found
                continue
            place = f"record {found.number}"
            try:
                text = _read_text(found, chunk.source.encoding)
            except UnreadableRecord as error:
                yield BadRecord(chunk.source.name, place, str(error), found.content)
                continue
            if text is not None:
                url = found.headers.get("warc-target-uri", "").strip("<>")
                record = {"text": text, "url": url, "date": found.headers.get("warc-date", "")}
                yield from fields.documents(record, place, found.content)


def _read_records(stream: io.BufferedReader, name: str) -> Iterator[_Record | BadRecord]:
    number = 0
    lost = 0
    while line := stream.readline(READ_BYTES):
        if not _VERSION.fullmatch(line):
            if line.strip() and not number and not lost:
                raise BrokenStream("it does not begin with WARC/1.0; not a WARC file")
            lost += len(line) if line.strip() else 0
            continue
        if lost:  # the length of the record before was wrong
            yield BadRecord(name, f"after record {number}", "bytes that belong to no record", b"", lost)
            lost = 0
        number += 1
        headers: dict[str, str] = {}
        while (line := stream.readline(READ_BYTES)) and line.strip():
            key, _, value = line.decode("utf-8", "replace").partition(":")
            headers[key.strip().lower()] = value.strip()
        length = headers.get("content-length", "")
        if not length.isdecimal() or len(length) > 15:
            yield BadRecord(name, f"record {number}", f"its Content-Length is {length[:20]!r}", b"")
            continue
        size = int(length)
        content = stream.read(min(size, records.MAX_RECORD_BYTES))
        while size > records.MAX_RECORD_BYTES and (skipped := stream.read(min(READ_BYTES, size - len(content)))):
            size -= len(skipped)
        if len(content) < size:
            yield BadRecord(name, f"record {number}", "truncated, or longer than a record may be", b"", len(content))
        else:
            yield _Record(number, headers, content)
    if lost:
        yield BadRecord(name, f"after record {number}", "bytes that belong to no record", b"", lost)


def _read_text(found: _Record, encoding: str) -> str | None:
    """The text of a record; None if it is of a kind without text."""
    kind = found.headers.get("warc-type", "").lower()
    content_type = found.headers.get("content-type", "").lower()
    if kind not in ("response", "conversion", "resource"):
        return None
    content = found.content
    charset = encoding
    if kind == "response":
        if not content.startswith(b"HTTP/"):
            return None
        stream = io.BytesIO(content)
        status = stream.readline(_MAX_CHUNK_LINE).split()
        try:
            headers = parse_headers(stream)
        except Exception as error:  # too many headers, or lines too long
            raise UnreadableRecord(f"its HTTP headers are damaged ({error})") from None
        content_type = headers.get_content_type() if headers.get("content-type") else "text/html"
        if len(status) < 2 or not status[1].startswith(b"2"):
            return None
        if content_type not in (*_HTML_TYPES, "text/plain"):
            return None
        _check_digest(found)
        charset = headers.get_content_charset() or encoding
        content = _decode_body(stream.read(), headers.get("transfer-encoding", ""), headers.get("content-encoding", ""))
    elif not content_type.startswith((*_HTML_TYPES, "text/plain")):
        return None
    else:
        _check_digest(found)
    if content_type.startswith("text/plain"):
        return decode_text(content, _known_encoding(charset, encoding))
    return extract_page(content, _known_encoding(charset, encoding), is_main=True)


def _known_encoding(charset: str, default: str) -> str:
    try:
        b"".decode(charset)
    except LookupError:
        return default
    return charset


def _check_digest(found: _Record) -> None:
    algorithm, _, digest = found.headers.get("warc-block-digest", "").partition(":")
    if algorithm.lower() not in ("sha1", "sha256", "md5"):
        return
    computed = hashlib.new(algorithm.lower(), found.content, usedforsecurity=False)
    known = (base64.b32encode(computed.digest()).decode().strip("="), computed.hexdigest().upper())
    if digest.upper().strip("=") not in known:
        raise UnreadableRecord(f"its {algorithm} is not the one in its header: damaged")


def _decode_body(body: bytes, transfer: str, coding: str) -> bytes:
    if "chunked" in transfer.lower():
        body = _join_chunks(body)
    if coding.lower() in ("", "identity"):
        return body
    if coding.lower() not in ("gzip", "x-gzip", "deflate") or not body.startswith((b"\x1f\x8b", b"\x78")):
        # Crawlers leave the header when they store the decoded page.
        if body.lstrip()[:1] == b"<":
            return body
        raise UnreadableRecord(f"its page is compressed with {coding[:20]}, which is not read")
    decompressor = zlib.decompressobj(wbits=47)
    try:
        page = decompressor.decompress(body, records.MAX_RECORD_BYTES)
    except zlib.error as error:
        raise UnreadableRecord(f"its compressed page is damaged ({error})") from None
    if not decompressor.eof:
        raise UnreadableRecord("its compressed page is truncated or too large")
    return page


def _join_chunks(body: bytes) -> bytes:
    """The body of chunks; a body that was stored without them is returned as it is."""
    parts: list[bytes] = []
    place = 0
    while (end := body.find(b"\r\n", place, place + _MAX_CHUNK_LINE)) >= 0:
        try:
            size = int(body[place:end].partition(b";")[0].strip(), 16)
        except ValueError:
            if not parts:
                return body
            raise UnreadableRecord("the chunks of its page are damaged") from None
        if not size:
            return b"".join(parts)
        if size < 0 or end + 2 + size > len(body):
            raise UnreadableRecord("the chunks of its page are damaged")
        parts.append(body[end + 2 : end + 2 + size])
        place = end + 4 + size
    if not parts:
        return body
    raise UnreadableRecord("the chunks of its page end early")
