"""Read EPUB: the chapters in the order of the book.

An EPUB is a zip with a list of XHTML pages, which the reader of HTML reads. EbookLib is under the AGPL.
"""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from textmill.corpus.document_files import XmlTag, ZipOfXml, parse_xml
from textmill.corpus.formats.html import extract_page
from textmill.corpus.records import UnreadableRecord

_PAGES = ("application/xhtml+xml", "text/html")
_FONT_ENCRYPTION = (b"http://www.idpf.org/2008/embedding", b"http://ns.adobe.com/pdf/enc#RC")


def extract(raw: bytes, encoding: str) -> str:
    """The text of all pages; the page with the table of contents is left out."""
    archive = ZipOfXml(raw)
    if "META-INF/encryption.xml" in archive.names:
        encryption = archive.read("META-INF/encryption.xml")
        if encryption.count(b"EncryptionMethod") > sum(map(encryption.count, _FONT_ENCRYPTION)):
            raise UnreadableRecord("it is encrypted; textmill reads books without copy protection")
    packages = [tag.attributes.get("full-path", "") for tag in _tags(archive, "META-INF/container.xml", "rootfile")]
    if not packages:
        raise UnreadableRecord("META-INF/container.xml names no book")
    folder = posixpath.dirname(packages[0])
    pages = {}
    for tag in _tags(archive, packages[0], "item"):
        is_contents = "nav" in tag.attributes.get("properties", "").split()
        if tag.attributes.get("media-type") in _PAGES and not is_contents:
            path = posixpath.normpath(posixpath.join(folder, unquote(tag.attributes.get("href", ""))))
            pages[tag.attributes.get("id", "")] = path
    order = [
        pages[key] for tag in _tags(archive, packages[0], "itemref") if (key := tag.attributes.get("idref")) in pages
    ]
    texts = [extract_page(archive.read(path), encoding, is_main=False) for path in order]
    return "\n\n".join(filter(None, texts))


def _tags(archive: ZipOfXml, member: str, name: str) -> list[XmlTag]:
    tags: list[XmlTag] = []
    parse_xml(
        archive.read(member),
        lambda tag: tags.append(tag) if tag.name.rpartition(" ")[2] == name else None,
        lambda _: None,
        lambda _: None,
    )
    return tags
