"""Read a MediaWiki dump (pages-articles.xml) as a stream; one record per page of the main namespace.

Wikitext becomes the text that a reader of the page sees: templates, tables and references are removed, the text of
links, headings and lists stays. Parsers such as mwparserfromhell drop every template, also those of running text that
show a measure, a foreign word or a dash; the rules for these are at the end.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from textmill.config import CorpusConfig
from textmill.corpus.document import READ_BYTES, Document
from textmill.corpus.records import RAW_BYTES, BadRecord
from textmill.corpus.source import SourceChunk
from textmill.corpus.streams import BrokenStream, open_stream
from textmill.corpus.text_fields import parse_text_key

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


HIDDEN_PREFIXES = frozenset({"file", "image", "media", "category"})
"""Prefixes of links that show no text; a dump adds those of its language."""

_REDIRECT = re.compile(r"\s*#[^\W\d_]+(?: [^\W\d_]+)?\s*:?\s*\[\[[^\[\]\n]+\]\]")
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_REMOVED_ELEMENTS = (
    "ref|references|gallery|math|chem|timeline|score|imagemap|templatestyles|syntaxhighlight|source|hiero|graph|"
    "mapframe|style|inputbox"
)
_ELEMENT = re.compile(rf"<(/?)({_REMOVED_ELEMENTS})\b[^<>]*?(/?)\s*>", re.IGNORECASE)
_BRACE = re.compile(r"\{\{|\}\}|^[ :]*\{\||^[ ]*\|\}(?!\})", re.MULTILINE)
_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_EXTERNAL_LINK = re.compile(r"\[(?:https?:|ftp:|mailto:)?//[^\s\[\]]*([^\[\]\n]*)\]", re.IGNORECASE)
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*$", re.MULTILINE)
_LIST = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_RULE = re.compile(r"^-{4,}", re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]+__")
_BREAK = re.compile(r"<br\s*/?\s*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_EMPTY_BRACKETS = re.compile(r"[ \xa0]*[(（][\s,;:，；]*[)）]")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


def wikitext_to_plain(text: str, hidden: Collection[str] = HIDDEN_PREFIXES) -> str:
    """The text that a reader of the page sees, without infoboxes, tables and notes."""
    text = _COMMENT.sub("", text)
    text = _remove_elements(text)
    if "{{" in text:
        text = _remove_braces(show_templates(text))
    elif "{|" in text:
        text = _remove_braces(text)
    if "-{" in text:
        text = _VARIANT.sub(_first_variant, text)
    text = _replace_links(text, hidden)
    for pattern, replacement in (
        (_EXTERNAL_LINK, r"\1"),
        (_QUOTES, ""),
        (_HEADING, r"\2"),
        (_LIST, ""),
        (_RULE, ""),
        (_MAGIC, ""),
    ):
        text = pattern.sub(replacement, text)
    if "<" in text:
        text = _TAG.sub("", _BREAK.sub("\n", text))
    text = _EMPTY_BRACKETS.sub("", html.unescape(text))
    return _BLANK_LINES.sub("\n\n", text).strip()


def is_redirect(text: str, hidden: Collection[str] = HIDDEN_PREFIXES) -> bool:
    """True if a page only points to another: `#REDIRECT [[Page]]`, or the same in another language."""
    match = _REDIRECT.match(text)
    return bool(match) and not wikitext_to_plain(text[match.end() :], hidden)  # type: ignore[union-attr]


def _remove_elements(text: str) -> str:
    """Remove notes, formulas and the like; an unclosed element removes nothing."""
    opened: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for match in _ELEMENT.finditer(text):
        closing = match[1]
        name = match[2].lower()
        empty = match[3]
        if not closing and not empty:
            opened[name] = match.start()
        else:
            _add_span(spans, opened.pop(name, match.start()) if closing else match.start(), match.end())
    return _remove_spans(text, spans)


def _remove_braces(text: str) -> str:
    """Remove nested templates and tables; an unclosed one removes nothing."""
    opened: list[tuple[int, str]] = []
    counts = {"{{": 0, "{|": 0}
    spans: list[tuple[int, int]] = []
    for match in _BRACE.finditer(text):
        brace = match[0].strip(" :")
        if brace in counts:
            opened.append((match.start(), brace))
            counts[brace] += 1
            continue
        opening = "{{" if brace == "}}" else "{|"
        while counts[opening]:
            start, last = opened.pop()
            counts[last] -= 1
            if last == opening:
                _add_span(spans, start, match.end())
                break
    return _remove_spans(text, spans)


def _add_span(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Append a span; spans inside it are dropped."""
    while spans and spans[-1][0] >= start:
        spans.pop()
    spans.append((start, stop))


def _remove_spans(text: str, spans: list[tuple[int, int]]) -> str:
    parts = []
    end = 0
    for start, stop in spans:
        parts.append(text[end:start])
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def _replace_links(text: str, hidden: Collection[str]) -> str:
    """Replace links with their text, innermost first: an image caption may contain links."""

    def visible_text(match: re.Match[str]) -> str:
        target, bar, label = match[1].partition("|")
        prefix, colon, _ = target.strip().partition(":")
        if colon and prefix and (prefix.strip().lower() in hidden or (not bar and _LANGUAGE.fullmatch(prefix))):
            return ""
        return (label.rpartition("|")[2] if label.count("|") else label) or target.lstrip(":")

    while True:
        text, count = _LINK.subn(visible_text, text)
        if not count:
            return text


def _first_variant(match: re.Match[str]) -> str:
    """The first of several script variants."""
    spelling = match[1].rpartition("|")[2].partition(";")[0]
    return spelling.rpartition(":")[2].strip()


MAX_PASSES = 3
"""Templates nested deeper than this are removed with the one around them."""
_INNERMOST = re.compile(r"\{\{([^{}]{1,500})\}\}")
"""Longer templates are boxes or tables."""
_BAR = re.compile(r"\|(?![^\[\]]*\]\])")
"""A bar that is not inside a link."""
_NUMBER = re.compile(r"[-+−]?[\d.,/⁄ ]*\d[\d.,/⁄ ]*(?:e[-+]?\d+)?")
RANGE_WORDS = {
    "-": "–",
    "–": "–",
    "to": " to ",
    "and": " and ",
    "or": " or ",
    "x": " × ",
    "×": " × ",
    "by": " by ",
    "+/-": " ± ",
    "±": " ± ",
    "to(-)": " to ",
}
"""What stands between two numbers of a measure."""
SIGNS = {
    "snd": " – ",
    "spnd": " – ",
    "spaced ndash": " – ",
    "ndash": "–",
    "mdash": "—",
    "'": "'",
    "nbsp": " ",
    "·": " · ",
    "dot": " · ",
    "bullet": " • ",
    "times": "×",
}
"""Templates that stand for a sign."""
FIRST_ARGUMENT = frozenset(
    (
        "nowrap|nobr|small|big|smaller|larger|abbr|tooltip|ill|interlanguage link|val|nihongo|transliteration|translit|"
        "key press|sic|strong|em|var|mvar|sup|sub|linktext|native name|visible anchor"
    ).split("|")
)
"""Templates that show their first argument."""


def show_templates(text: str) -> str:
    """The text with the templates of running text replaced; all others stay as they are."""
    for _ in range(MAX_PASSES):
        shown = _INNERMOST.sub(_show, text)
        if shown == text:
            break
        text = shown
    return text


def _show(found: re.Match[str]) -> str:
    """What a template shows; the template itself if it is not one of running text."""
    name, *parts = _BAR.split(found[1])
    name = name.strip().replace("_", " ").lower()
    if name.startswith("formatnum:"):
        return name.removeprefix("formatnum:").strip()
    arguments = [part.strip() for part in parts if "=" not in part or part.lstrip().startswith("1=")]
    arguments = [argument.removeprefix("1=").strip() for argument in arguments]
    if name in SIGNS and not arguments:
        return SIGNS[name]
    show = _show_function(name)
    return (show(arguments) if show and arguments else None) or found[0]


def _show_function(name: str) -> Callable[[list[str]], str] | None:
    if name in ("convert", "cvt"):
        return _measure
    if name in ("circa", "c.", "ca."):
        return lambda arguments: f"c. {'–'.join(arguments)}"
    if name in ("frac", "fraction", "sfrac"):
        return _fraction
    if name == "lang":
        return lambda arguments: arguments[1] if len(arguments) > 1 else ""
    if name in FIRST_ARGUMENT or name.startswith("lang-"):
        return lambda arguments: arguments[0]
    return None


def _measure(arguments: list[str]) -> str:
    """The numbers of a measure and the unit that they are in: `4|kg|lb` is 4 kg, `4|to|6|ft` is 4 to 6 ft."""
    shown = ""
    for place, argument in enumerate(arguments):
        if _NUMBER.fullmatch(argument):
            shown += argument
        elif argument.lower() in RANGE_WORDS and place + 1 < len(arguments):
            shown += RANGE_WORDS[argument.lower()]
        else:
            return f"{shown} {argument}" if shown else ""
    return shown


def _fraction(arguments: list[str]) -> str:
    numbers = arguments[-2:]
    shown = "/".join(numbers) if len(numbers) == 2 else f"1/{numbers[0]}"
    return f"{arguments[0]} {shown}" if len(arguments) > 2 else shown
