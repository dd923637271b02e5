"""Read a MediaWiki dump (pages-articles.xml) as a stream; one record per page of the main namespace."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from textmill.config import CorpusConfig
from textmill.corpus.document import READ_BYTES, Document
from textmill.corpus.records import RAW_BYTES, BadRecord
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import BrokenStream, open_stream
from textmill.corpus.text_fields import parse_text_key
from textmill.corpus.wiki_markup import HIDDEN_PREFIXES, is_redirect, wikitext_to_plain

ROOT = "mediawiki"
FILE_NAMESPACE = "6"
CATEGORY_NAMESPACE = "14"
"""Namespaces whose links show no text; each language names them differently."""


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Yield pages with the fields id, title and text (plain); `title` is kept as metadata by default. Redirects are
    skipped."""
    fields = parse_text_key(chunk.source, config, kept_fields=("title",))
    hidden = set(HIDDEN_PREFIXES)
    with open_stream(chunk.source) as stream:
        for element in _elements(stream):
            if _name(element) == "namespace":
                if element.get("key") in (FILE_NAMESPACE, CATEGORY_NAMESPACE) and element.text:
                    hidden.add(element.text.lower())
                continue
            children = {_name(child): child for child in element}
            if _text(children.get("ns")) not in ("0", "") or "redirect" in children:
                continue
            wikitext = next((_text(child) for child in children.get("revision", ()) if _name(child) == "text"), "")
            if is_redirect(wikitext, hidden):  # some dumps mark redirects only in the text
                continue
            page = {
                "id": _text(children.get("id")),
                "title": _text(children.get("title")),
                "text": wikitext_to_plain(wikitext, hidden),
            }
            yield from fields.documents(page, f"page {page['id']}", wikitext[:RAW_BYTES].encode()[:RAW_BYTES])


def _elements(stream: io.BufferedReader) -> Iterator[Element]:
    """Yield the namespaces and every page; each element's memory is released afterwards."""
    parser: Any = XMLPullParser(["start", "end"])
    path: list[Element] = []
    found_any = False
    try:
        while block := stream.read1(READ_BYTES):
            parser.feed(block)
            for event, element in parser.read_events():
                if event == "start":
                    if not path and not found_any and _name(element) != ROOT:
                        raise BrokenStream(
                            f"not a MediaWiki dump: its first element is <{_name(element)}>, not <{ROOT}>; "
                            "convert the file to JSON lines"
                        )
                    path.append(element)
                    continue
                path.pop()
                if _name(element) in ("page", "namespace"):
                    found_any = True
                    yield element
                    path[-1].clear()
        if not found_any and not path:
            return
        parser.close()
    except ParseError as error:
        raise BrokenStream(f"invalid or incomplete XML: {error}") from None


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: Element | None) -> str:
    return (element.text or "") if element is not None else ""
