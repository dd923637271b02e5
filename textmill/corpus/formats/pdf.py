"""Read PDF files: the text of their pages, with pdfium.

pdfium is the reader of Chrome, which is tested against damaged files; PyMuPDF is under the AGPL. pdfium shows what it
can of a damaged file, so the checksums of compressed streams are compared first.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

from textmill.corpus import records
from textmill.corpus.document import READ_BYTES
from textmill.corpus.records import NO_TEXT_LAYER, UnreadableRecord

SCAN_CHARACTERS = 8
"""A file with fewer characters for each page has no text layer; a scan may have a stamp or page numbers."""
_LIGATURES = str.maketrans({"ﬀ": "ff", "ﬁ": "fi", "ﬂ": "fl", "ﬃ": "ffi", "ﬄ": "ffl", "ﬅ": "st", "ﬆ": "st"})
_HYPHEN = re.compile("[\ufffe\x02]\\s?")
"""What pdfium gives for the hyphen of a word that continues on the next line."""
_STREAM = re.compile(rb"stream\r?\n")
_FIRST_FILTER = re.compile(rb"/Filter\s*\[?\s*/FlateDecode")
DICTIONARY_BYTES = 2000
"""Where a stream's filter is looked for: so many bytes before it, from the start of its object."""


def extract(raw: bytes, encoding: str) -> str:
    """The text of all pages; lines end where they do on the page."""
    import pypdfium2

    _check_streams(raw)
    try:
        document = pypdfium2.PdfDocument(raw)
    except pypdfium2.PdfiumError as error:
        if "assword" in str(error):
            raise UnreadableRecord("it is encrypted; remove its password") from None
        raise UnreadableRecord(f"a damaged PDF ({str(error).rstrip('.')})") from None
    try:
        return _read_pages(document)
    except pypdfium2.PdfiumError as error:
        raise UnreadableRecord(f"a damaged PDF ({str(error).rstrip('.')})") from None
    finally:
        document.close()


def _read_pages(document: Any) -> str:
    pages = []
    size = 0
    for number, page in enumerate(document, 1):
        text_page = page.get_textpage()
        text = text_page.get_text_range(errors="replace").replace("\r\n", "\n").strip()
        text_page.close()
        page.close()
        if "\ufffd" in text:
            raise UnreadableRecord(f"page {number} has characters that mean nothing")
        pages.append(_HYPHEN.sub("", text).translate(_LIGATURES))
        size += len(text)
        if size > records.MAX_RECORD_BYTES:
            raise UnreadableRecord(f"it has more than the maximum of {records.MAX_RECORD_BYTES:,} characters")
    if size < SCAN_CHARACTERS * len(pages) or not pages:
        where = "page" if len(pages) == 1 else f"{len(pages):,} pages"
        raise UnreadableRecord(f"{NO_TEXT_LAYER} on its {where}: a scan; recognise its text (OCR) first")
    return "\n\n".join(filter(None, pages))


def _check_streams(raw: bytes) -> None:
    """Refuse a file with a compressed stream whose checksum is wrong, or that ends early; not of encrypted files."""
    if b"/Encrypt" in raw:
        return
    view = memoryview(raw)
    end = 0
    while found := _STREAM.search(raw, end):
        dictionary = raw[max(end, found.start() - DICTIONARY_BYTES) : found.start()].rpartition(b"obj")[2]
        end = found.end()
        if dictionary.rstrip().endswith(b">>") and _FIRST_FILTER.search(dictionary) and b"/Image" not in dictionary:
            end = _check_stream(view, end)


def _check_stream(view: memoryview, start: int) -> int:
    """Where a compressed stream ends."""
    stream = zlib.decompressobj()
    place = start
    size = 0
    try:
        while not stream.eof and place < len(view) and size <= records.MAX_RECORD_BYTES:
            block = stream.unconsumed_tail or view[place : place + READ_BYTES]
            place += 0 if stream.unconsumed_tail else len(block)
            size += len(stream.decompress(block, 1 << 20))
    except zlib.error as error:
        raise UnreadableRecord(f"the stream at byte {start:,} is damaged ({error})") from None
    if not stream.eof:
        raise UnreadableRecord(f"the stream at byte {start:,} is truncated or too large")
    return place - len(stream.unused_data)
