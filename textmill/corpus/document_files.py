"""Files that hold one text each, such as PDF or DOCX: what a file is by its content, its text, and how it is cut.

The module of each of these formats has a function `extract` from the bytes of a file to its text, and no `read`. A file
with a wrong extension is read as what it is. The text is cut as a plain text file is: `corpus.documents` applies.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple
from xml.parsers import expat

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document, cut_into_sections, limits_of
from textmill.corpus.encodings import SAMPLE_BYTES, find_binary_format, is_utf8, mark_length, resolve_encoding
from textmill.corpus.records import BadRecord, UnreadableRecord, describe_encoding_error
from textmill.corpus.source import PACKAGES_ADVICE, Source, SourceChunk, format_from_name, missing_package
from textmill.corpus.streams import open_decompressed

TEXT_SHARES = {"pdf": 0.05, "html": 0.15, "epub": 0.3, "office": 0.3, "warc": 0.1, "rtf": 0.15}
"""Roughly, the part of a file that is text; much more is pictures, fonts or markup in some files."""
HEAD_BYTES = 1 << 12
"""First bytes that show what a file is."""
_HTML = re.compile(rb"\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html)[\s>]", re.I | re.S)
_MAIL = re.compile(rb"From \S+.*\d\d:\d\d.*\n[A-Za-z-]+:")


def format_from_content(path: str) -> str | None:
    """The format of a local file whose name does not show it; None if its first bytes do not show it either."""
    try:
        with open(path, "rb") as file:
            return find_format(file.read(HEAD_BYTES))
    except OSError:
        return None


def find_format(head: bytes) -> str | None:
    """The format that the first bytes of a file show, for formats with clear signs."""
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"{\\rtf"):
        return "rtf"
    if head.startswith(b"PK\x03\x04"):
        if b"application/epub+zip" in head[:200]:
            return "epub"
        is_office = b"application/vnd.oasis.opendocument.text" in head[:200] or b"word/" in head
        return "office" if is_office or b"[Content_Types].xml" in head else None
    if head.startswith((b"WARC/1.", b"WARC/0.")):
        return "warc"
    if _MAIL.match(head):
        return "mail"
    return "html" if _HTML.match(head.removeprefix(b"\xef\xbb\xbf")) else None


def describe_unread_documents(skipped: Sequence[str]) -> str | None:
    """What the packages of documents would add, for files that were skipped without them; None if there are none."""
    counts: Counter[str] = Counter()
    text_bytes = 0.0
    for path in skipped:
        file_format = format_from_name(path) or ""
        if missing_package(file_format):
            counts[file_format] += 1
            with suppress(OSError):  # a file of an archive has no size of its own
                text_bytes += TEXT_SHARES[file_format] * os.path.getsize(path)
    if not counts:
        return None
    files = ", ".join(f"{number:,} {name}" for name, number in counts.most_common())
    return f"files not read: {files}; {PACKAGES_ADVICE} adds roughly {text_bytes / 1e6:,.1f} MB of text"


def read_document(chunk: SourceChunk, config: CorpusConfig, meta: str | None = None) -> Iterator[Document | BadRecord]:
    """Yield the parts of a file's text, or one bad record with the reason why it has none."""
    name = chunk.source.name
    raw = b""
    try:
        raw = _read_file(chunk.source)
        text = extract_text(raw, chunk.source.format, chunk.source.encoding)
        text.encode()
    except UnreadableRecord as error:
        yield BadRecord(name, "file", str(error), raw)
    except UnicodeEncodeError as error:
        yield BadRecord(name, "file", f"a lone surrogate at character {error.start:,}", raw)
    else:
        yield from _cut_text(text, name, config, meta)


def extract_text(raw: bytes, file_format: str, encoding: str = "auto") -> str:
    """The text of a file, read as `file_format` unless its first bytes show another format."""
    found = find_format(raw[:HEAD_BYTES])
    if found in ("warc", "mail"):  # these hold several texts
        raise UnreadableRecord(f"it is a file of {found}, whatever its name says; rename it")
    if file_format == "code":  # a template of a page, for example
        found = None
    extract: Callable[[bytes, str], str] = import_module(f"textmill.corpus.formats.{found or file_format}").extract
    if missing := missing_package(found or file_format):
        raise UnreadableRecord(f"it is {found}, which needs {missing}; run: {PACKAGES_ADVICE}")
    try:
        return extract(raw, encoding)
    except RecursionError:
        raise UnreadableRecord("its parts are nested too deeply") from None


def decode_text(raw: bytes, encoding: str) -> str:
    """Decode a file of text strictly; `encoding`: from `corpus.encoding`, or what the file itself declares."""
    if (kind := find_binary_format(raw)) is not None:
        raise UnreadableRecord(f"the file is {kind}: not text, whatever its name says; rename or remove it")
    found = resolve_encoding(encoding, raw[:SAMPLE_BYTES])
    if found != "utf-8" and not found.startswith("utf-") and is_utf8(raw):
        found = "utf-8"
    body = raw[mark_length(raw) :]
    try:
        text = body.decode(found)
    except UnicodeDecodeError as error:
        if found == "utf-8":
            raise UnreadableRecord(describe_encoding_error(body, error.start)) from None
        raise UnreadableRecord(f"not {found}: byte 0x{body[error.start]:02x} at {error.start:,}") from None
    if text.count("\0") > len(text) // 100:
        raise UnreadableRecord("it has NUL bytes: not text, or in another encoding; set corpus.encoding")
    return text


def _read_file(source: Source) -> bytes:
    with open_decompressed(source.address) as stream:
        raw = stream.read(records.MAX_RECORD_BYTES + 1)
    if len(raw) > records.MAX_RECORD_BYTES:
        raise UnreadableRecord(f"the file has more than the maximum of {records.MAX_RECORD_BYTES:,} bytes; split it")
    return raw


def _cut_text(text: str, name: str, config: CorpusConfig, meta: str | None) -> Iterator[Document]:
    """The documents that `corpus.documents` makes of a text."""
    unit = config.documents
    if unit == "file" or text.isspace() or not text:
        yield Document(text, name, "file", meta)
        return
    limits = limits_of(unit, config.section_chars)
    parts = text.splitlines() if unit == "line" else cut_into_sections(text, limits)
    for number, part in enumerate(parts, 1):
        yield Document(part, name, f"{unit} {number}", meta)


# Files that are zips of XML: DOCX, ODT and EPUB


class ZipOfXml:
    """The members of a document that is a zip. What is damaged, encrypted or too large is an UnreadableRecord."""

    def __init__(self, raw: bytes) -> None:
        self.bytes_left = records.MAX_RECORD_BYTES
        try:
            self.archive = zipfile.ZipFile(io.BytesIO(raw))
        except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError, EOFError) as error:
            raise UnreadableRecord(f"a damaged or truncated zip ({error})") from None
        self.names = set(self.archive.namelist())

    def read(self, name: str) -> bytes:
        """A member, with its checksum compared."""
        try:
            with self.archive.open(name) as stream:
                content = stream.read(self.bytes_left + 1)
        except KeyError:
            raise UnreadableRecord(f"it has no '{name}'") from None
        except RuntimeError:
            raise UnreadableRecord("it is encrypted; remove its password") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError) as error:
            raise UnreadableRecord(f"'{name}' is damaged ({error})") from None
        self.bytes_left -= len(content)
        if self.bytes_left < 0:
            raise UnreadableRecord(f"it unpacks to more than the maximum of {records.MAX_RECORD_BYTES:,} bytes")
        return content


class XmlTag(NamedTuple):
    """An element: its name and its attributes, each as 'namespace name'."""

    name: str
    attributes: dict[str, str]


def parse_xml(
    content: bytes, start: Callable[[XmlTag], None], end: Callable[[str], None], text: Callable[[str], None]
) -> None:
    """Call a function for each start, end and text of XML. A document type, and so any entity, is refused."""

    def refuse(*_: object) -> None:
        raise UnreadableRecord("its XML declares a document type, which may hold entities that grow without end")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = lambda name, attributes: start(XmlTag(name, attributes))
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise UnreadableRecord(f"its XML is damaged ({error})") from None
