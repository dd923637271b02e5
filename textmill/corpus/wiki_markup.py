"""Wikitext to plain text: templates, tables, references and files go; links, headings and lists leave their words."""

from __future__ import annotations

import html
import re
from collections.abc import Collection

HIDDEN = frozenset({"file", "image", "media", "category"})
"""Prefixes of links that show no words of the text; a dump adds its own language's."""

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_GONE = "ref|references|gallery|math|chem|timeline|score|imagemap|templatestyles|syntaxhighlight|source|hiero|graph|mapframe|style|inputbox"
_ELEMENT = re.compile(rf"<(/?)({_GONE})\b[^<>]*?(/?)\s*>", re.IGNORECASE)
_BRACE = re.compile(r"\{\{|\}\}|^[ :]*\{\||^[ ]*\|\}(?!\})", re.MULTILINE)
_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_OUTSIDE = re.compile(r"\[(?:https?:|ftp:|mailto:)?//[^\s\[\]]*([^\[\]\n]*)\]", re.IGNORECASE)
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^(={1,6})[ \t]*(.+?)[ \t]*\1[ \t]*$", re.MULTILINE)
_LIST = re.compile(r"^[*#:;]+[ \t]*", re.MULTILINE)
_RULE = re.compile(r"^-{4,}", re.MULTILINE)
_MAGIC = re.compile(r"__[A-Z]+__")
_BREAK = re.compile(r"<br\s*/?\s*>", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_HOLLOW = re.compile(r"[ \xa0]*[(（][\s,;:，；]*[)）]")
_BLANKS = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")


def plain_text(text: str, hidden: Collection[str] = HIDDEN) -> str:
    """The words that a reader of the page sees, without what stands in boxes, tables and notes."""
    text = _COMMENT.sub("", text)
    text = _without_braces(_without_elements(text))
    if "-{" in text:
        text = _VARIANT.sub(_first_variant, text)
    text = _without_links(text, hidden)
    for pattern, left in ((_OUTSIDE, r"\1"), (_QUOTES, ""), (_HEADING, r"\2"), (_LIST, ""), (_RULE, ""), (_MAGIC, "")):
        text = pattern.sub(left, text)
    if "<" in text:
        text = _TAG.sub("", _BREAK.sub("\n", text))
    text = _HOLLOW.sub("", html.unescape(text))
    return _BLANKS.sub("\n\n", text).strip()


def _without_elements(text: str) -> str:
    """Notes, formulas and the like; one that is never closed takes nothing with it."""
    opened: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for found in _ELEMENT.finditer(text):
        closing, name, empty = found[1], found[2].lower(), found[3]
        if not closing and not empty:
            opened[name] = found.start()
        else:
            _add(spans, opened.pop(name, found.start()) if closing else found.start(), found.end())
    return _without(text, spans)


def _without_braces(text: str) -> str:
    """Templates and tables, nested as they may be; one that is never closed takes nothing with it."""
    opened: list[tuple[int, str]] = []
    counts = {"{{": 0, "{|": 0}
    spans: list[tuple[int, int]] = []
    for found in _BRACE.finditer(text):
        sign = found[0].strip(" :")
        if sign in counts:
            opened.append((found.start(), sign))
            counts[sign] += 1
            continue
        wanted = "{{" if sign == "}}" else "{|"
        while counts[wanted]:
            start, last = opened.pop()
            counts[last] -= 1
            if last == wanted:
                _add(spans, start, found.end())
                break
    return _without(text, spans)


def _add(spans: list[tuple[int, int]], start: int, stop: int) -> None:
    """Put a span behind the others; those that it holds go."""
    while spans and spans[-1][0] >= start:
        spans.pop()
    spans.append((start, stop))


def _without(text: str, spans: list[tuple[int, int]]) -> str:
    parts, end = [], 0
    for start, stop in spans:
        parts.append(text[end:start])
        end = max(end, stop)
    return "".join([*parts, text[end:]])


def _without_links(text: str, hidden: Collection[str]) -> str:
    """Innermost first: a picture's caption may hold links of its own."""

    def shown(found: re.Match[str]) -> str:
        target, bar, label = found[1].partition("|")
        prefix, colon, _ = target.strip().partition(":")
        if colon and prefix and (prefix.strip().lower() in hidden or (not bar and _LANGUAGE.fullmatch(prefix))):
            return ""
        return (label.rpartition("|")[2] if label.count("|") else label) or target.lstrip(":")

    while True:
        text, count = _LINK.subn(shown, text)
        if not count:
            return text


def _first_variant(found: re.Match[str]) -> str:
    """Of the spellings for several scripts the first."""
    words = found[1].rpartition("|")[2].partition(";")[0]
    return words.rpartition(":")[2].strip()
