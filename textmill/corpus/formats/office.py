"""Read DOCX and ODT: paragraphs, headings, lists, tables and footnotes.

Both are zips of XML whose paragraphs the standard library reads in a few lines. python-docx and odfpy build objects of
the full document, need lxml, and leave out footnotes and text boxes.
"""

from __future__ import annotations

from textmill.corpus.document_files import XmlTag, ZipOfXml, parse_xml
from textmill.corpus.records import UnreadableRecord

_DOCX = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT_DOCX = "http://purl.oclc.org/ooxml/wordprocessingml/main"
_MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
_ODF = "urn:oasis:names:tc:opendocument:xmlns"
_TEXT = f"{_ODF}:text:1.0"
_TABLE = f"{_ODF}:table:1.0"
_SHORT = {_DOCX: "w", _STRICT_DOCX: "w", _MATH: "m", _TEXT: "text", _TABLE: "table"}
_SKIPPED = {
    # The same text box again for older programs; codes of fields; deleted text, also of moves.
    "http://schemas.openxmlformats.org/markup-compatibility/2006 Fallback",
    *(f"{one} {name}" for one in (_DOCX, _STRICT_DOCX) for name in ("instrText", "delText", "del", "moveFrom")),
    f"{_ODF}:office:1.0 annotation",
    f"{_TEXT} tracked-changes",
    f"{_TEXT} note-citation",
    f"{_ODF}:office:1.0 forms",
}
_PARAGRAPHS = ("w p", "text p", "text h")
_CELLS = ("w tc", "table table-cell")
_ROWS = ("w tr", "table table-row")
_NOTES = ("word/footnotes.xml", "word/endnotes.xml")


def extract(raw: bytes, encoding: str) -> str:
    """The text of a DOCX or ODT file; footnotes are at its end."""
    if raw.startswith(b"\xd0\xcf\x11\xe0"):
        raise UnreadableRecord("an encrypted document, or one of an old Word; save it as DOCX without a password")
    archive = ZipOfXml(raw)
    if "content.xml" in archive.names:
        if "META-INF/manifest.xml" in archive.names and b"encryption-data" in archive.read("META-INF/manifest.xml"):
            raise UnreadableRecord("it is encrypted; remove its password")
        return _read_xml(archive.read("content.xml"), is_odf=True)
    parts = ["word/document.xml", *(name for name in _NOTES if name in archive.names)]
    return "\n\n".join(filter(None, (_read_xml(archive.read(name), is_odf=False) for name in parts)))


def _read_xml(content: bytes, is_odf: bool) -> str:
    reader = _Paragraphs(is_odf)
    parse_xml(content, reader.start, reader.end, reader.text)
    return "".join([*reader.parts, *reader.notes]).strip()


class _Paragraphs:
    """Collects the text of paragraphs."""

    def __init__(self, is_odf: bool) -> None:
        self.is_odf = is_odf
        self.parts: list[str] = []
        self.notes: list[str] = []
        self.body = self.parts
        """Where text goes: to the parts, or inside a note of ODF to the notes."""
        self.skipping = 0
        """How many open elements are inside a skipped one, itself included."""
        self.paragraphs = 0
        """Open paragraphs; text between them is layout. A text box is a paragraph inside a paragraph."""
        self.in_text = 0
        self.cells = 0
        self.lists = 0
        self.item_starts = False

    def start(self, tag: XmlTag) -> None:
        if self.skipping or tag.name in _SKIPPED:
            self.skipping += 1
            return
        name = _short_name(tag.name)
        if name in _PARAGRAPHS:
            self.paragraphs += 1
            if self.item_starts:
                self.body.append("- ")
                self.item_starts = False
        elif name in ("w t", "m t"):
            self.in_text += 1
        elif name in ("w tab", "text tab"):
            if self.paragraphs:
                self.body.append("\t")
        elif name in ("w br", "w cr", "text line-break"):
            self.body.append("\n")
        elif name == "w noBreakHyphen":
            self.body.append("-")
        elif name == "text s":
            self.body.append(" " * min(_count(tag.attributes.get(f"{_TEXT} c", "1")), 100))
        elif name == "w numPr":
            self.body.append("- ")
            self.lists += 1
        elif name == "text list":
            self.lists += 1
        elif name == "text list-item":
            self.item_starts = True
        elif name in _CELLS:
            self.cells += 1
        elif name == "text note":
            self.body = self.notes

    def end(self, full_name: str) -> None:
        if self.skipping:
            self.skipping -= 1
            return
        name = _short_name(full_name)
        if name in _PARAGRAPHS:
            self.paragraphs -= 1
            self.body.append(" " if self.cells else "\n" if self.lists else "\n\n")
            if not self.is_odf:
                self.lists = 0
        elif name in ("w t", "m t"):
            self.in_text -= 1
        elif name in _CELLS:
            self.cells -= 1
            self.body.append("\t")
        elif name in _ROWS:
            self.body.append("\n")
        elif name == "text list":
            self.lists -= 1
            self.item_starts = False
            if not self.lists:
                self.body.append("\n")
        elif name == "text note":
            self.body = self.parts

    def text(self, text: str) -> None:
        if not self.skipping and (self.paragraphs if self.is_odf else self.in_text):
            # In ODF line ends and runs of spaces are layout of the XML.
            self.body.append(text.replace("\n", " ") if self.is_odf else text)


def _short_name(name: str) -> str:
    namespace, _, local = name.rpartition(" ")
    return f"{_SHORT.get(namespace, '')} {local}"


def _count(value: str) -> int:
    return int(value) if value.isdecimal() else 1
