"""Convert wikitext to plain text: remove templates, tables and references; keep the text of links, headings and
lists."""

from __future__ import annotations

import html
import re
from collections.abc import Collection

from textmill.corpus.wiki_templates import show_templates

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
