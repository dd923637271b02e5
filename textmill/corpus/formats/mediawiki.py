"""A MediaWiki dump (pages-articles.xml), streamed: a record a page of the main namespace that is no redirect."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from textmill.config import CorpusConfig
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.records import RAW_BYTES, BadRecord
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import BrokenStream, open_stream
from textmill.corpus.text_fields import parse_text_key
from textmill.corpus.wiki_markup import HIDDEN_PREFIXES, wikitext_to_plain

FILE_NAMESPACE, CATEGORY_NAMESPACE = "6", "14"
"""Namespaces whose links show no words of the text; each language names them in its own way."""


def read(chunk: SourceChunk, config: CorpusConfig) -> Iterator[Document | BadRecord]:
    """Pages with the fields id, title and text (plain); the title is kept as metadata where nothing else is asked for."""
    fields, hidden = parse_text_key(chunk.source, config, kept_fields=("title",)), set(HIDDEN_PREFIXES)
    with open_stream(chunk.source.address) as stream:
        for element in _elements(stream):
            if _name(element) == "namespace":
                if element.get("key") in (FILE_NAMESPACE, CATEGORY_NAMESPACE) and element.text:
                    hidden.add(element.text.lower())
                continue
            fields_by_name = {_name(one): one for one in element}
            if _text(fields_by_name.get("ns")) not in ("0", "") or "redirect" in fields_by_name:
                continue
            wikitext = next((_text(one) for one in fields_by_name.get("revision", ()) if _name(one) == "text"), "")
            page = {
                "id": _text(fields_by_name.get("id")),
                "title": _text(fields_by_name.get("title")),
                "text": wikitext_to_plain(wikitext, hidden),
            }
            yield from fields.documents(page, f"page {page['id']}", wikitext[:RAW_BYTES].encode()[:RAW_BYTES])


def _elements(stream: io.BufferedReader) -> Iterator[Element]:
    """Every page, and the namespaces before them; what was handed out is forgotten at once."""
    parser: Any = XMLPullParser(["start", "end"])
    path: list[Element] = []
    seen = False
    try:
        while block := stream.read1(records.READ_BYTES):
            parser.feed(block)
            for event, element in parser.read_events():
                if event == "start":
                    path.append(element)
                    continue
                path.pop()
                if _name(element) in ("page", "namespace"):
                    seen = True
                    yield element
                    path[-1].clear()
        if not seen and not path:
            return
        parser.close()
    except ParseError as error:
        raise BrokenStream(f"not XML, or the dump breaks off: {error}") from None


def _name(element: Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: Element | None) -> str:
    return (element.text or "") if element is not None else ""
