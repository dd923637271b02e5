"""Read LaTeX: the text between \\begin{document} and \\end{document}, with formulas as they are written.

Corpora of papers keep LaTeX's own notation for mathematics, since models learn it. pylatexenc raises an IndexError on
\\href and writes formulas with signs that nobody can type.
"""

from __future__ import annotations

import re
import unicodedata

from textmill.corpus.document_files import decode_text
from textmill.corpus.records import UnreadableRecord

_TOKEN = re.compile(
    r"(?P<verbatim>\\begin\{(?P<kind>verbatim\*?|lstlisting|minted|Verbatim)\}.*?\\end\{(?P=kind)\})"
    r"|(?P<display>\\begin\{(?P<name>(?:equation|align|gather|multline|eqnarray|displaymath|math)\*?)\}.*?"
    r"\\end\{(?P=name)\})"
    r"|(?P<math>\$\$.*?\$\$|\$(?:\\.|[^$\\\n]|\n(?!\s*\n))*\$|\\\[.*?\\\]|\\\(.*?\\\))"
    r"|\\(?P<environment>begin|end)\s*\{(?P<which>[^{}]*)\}"
    r"|\\(?P<accent>[`'^\"~=.]|[Hckbduvrt](?![A-Za-z]))\s*(?:\{\s*\\?(?P<braced>[A-Za-z]?)\s*\}|\\?(?P<bare>[A-Za-z]))"
    r"|\\(?P<command>[A-Za-z@]+)\*?[ \t]*\n?"
    r"|\\(?P<symbol>[^A-Za-z])"
    r"|(?P<comment>(?:(?<=\n)[ \t]*)?%[^\n]*(?:\n[ \t]*)?)"
    r"|(?P<sign>---|--|``|''|\}\{|[{}~&])",
    re.DOTALL,
)
_OPTION = re.compile(r"\[[^\[\]]{0,500}\]")
_ARGUMENT = re.compile(r"\s?\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\}){0,2000}\}")
_DEFINITION = re.compile(r"\\[A-Za-z@]+[^{}]{0,50}" + _ARGUMENT.pattern)
_ACCENTS = dict(
    zip(
        "`'^\"~=.Hckbduvrt",
        "\u0300\u0301\u0302\u0308\u0303\u0304\u0307\u030b\u0327\u0328\u0331\u0323\u0306\u030c\u030a\u0361",
        strict=True,
    )
)
_LETTERS = {
    **{"ss": "ß", "ae": "æ", "AE": "Æ", "oe": "œ", "OE": "Œ", "aa": "å", "AA": "Å", "o": "ø", "O": "Ø", "l": "ł"},
    **{"L": "Ł", "i": "ı", "j": "ȷ", "dots": "…", "ldots": "…", "textbackslash": "\\", "textasciitilde": "~"},
    **{"textasciicircum": "^", "textquotedblleft": "“", "textquotedblright": "”", "textquoteleft": "‘"},
    **{"textquoteright": "’", "textendash": "–", "textemdash": "—", "S": "§", "copyright": "©", "pounds": "£"},
    **{"LaTeX": "LaTeX", "TeX": "TeX", "quad": " ", "qquad": " ", "par": "\n\n", "newline": "\n", "item": "\n- "},
    **{"textquotesingle": "'", "euro": "€", "texteuro": "€", "guillemotleft": "«", "guillemotright": "»"},
}
_WITHOUT_TEXT = {
    **dict.fromkeys(
        "label ref eqref pageref autoref cref Cref nameref bibliography bibliographystyle input include".split(), 1
    ),
    **dict.fromkeys("includegraphics usepackage vspace hspace pagestyle thispagestyle hypersetup index url".split(), 1),
    **dict.fromkeys(
        "cite citep citet citeauthor citeyear textcite parencite nocite phantomsection footnotemark".split(), 1
    ),
    **dict.fromkeys(
        "hypertarget href color textcolor fontsize linewidth newcounter pdfbookmark graphicspath".split(), 1
    ),
    **dict.fromkeys("setlength setcounter newcommand renewcommand providecommand addtolength multicolumn".split(), 2),
}
"""Commands, and how many of their arguments are not text."""
_HEADINGS = ("part", "chapter", "section", "subsection", "subsubsection", "paragraph", "title", "caption")
_COLUMNS = (
    "tabular",
    "tabular*",
    "tabularx",
    "longtable",
    "array",
    "minipage",
    "thebibliography",
    "multicols",
    "adjustbox",
)
_BODY = re.compile(r"\\begin\s*\{document\}(.*?)(?:\\end\s*\{document\}|\Z)", re.DOTALL)
_TITLE = re.compile(r"\\title\s*(?:\[[^\[\]]*\])?\s*\{((?:[^{}]|\{[^{}]*\}){0,2000})\}")
_BLANK_LINES = re.compile(r"\n[ \t]*(?:\n[ \t]*)+\n?")


def extract(raw: bytes, encoding: str) -> str:
    """The text of a LaTeX file; the title comes first. A file without \\begin{document} is text from its start."""
    source = decode_text(raw, encoding).replace("\r\n", "\n")
    body = _BODY.search(source)
    if body is None and "\\documentclass" in source:
        raise UnreadableRecord("it has no \\begin{document}: truncated, or a style")
    title = _TITLE.search(source[: body.start()]) if body else None
    text = _to_text(body[1] if body else source)
    return f"{_to_text(title[1]).strip()}\n\n{text}" if title else text


def _to_text(source: str) -> str:
    parts: list[str] = []
    place = 0
    while found := _TOKEN.search(source, place):
        parts.append(source[place : found.start()])
        place = found.end()
        text, place = _read_token(found, source, place)
        parts.append(text)
    parts.append(source[place:])
    return _BLANK_LINES.sub("\n\n", unicodedata.normalize("NFC", "".join(parts))).strip()


def _read_token(found: re.Match[str], source: str, place: int) -> tuple[str, int]:
    """The text of a token, and where reading goes on after its arguments."""
    kind = found.lastgroup
    if found["verbatim"] or found["display"] or found["math"]:
        return found[0], place
    if found["comment"] is not None:
        return "", place
    if found["environment"]:
        place = _skip_options(source, place)
        if found["environment"] == "begin" and found["which"] in _COLUMNS:
            place = _skip_arguments(source, place, 2 if found["which"] in ("tabular*", "tabularx") else 1)
        return "\n", place
    if found["accent"] is not None:
        letter = found["braced"] or found["bare"] or ""
        return letter + _ACCENTS[found["accent"]] if letter else "", place
    if found["command"] is not None:
        return _read_command(found["command"], source, place)
    if found["symbol"] is not None:
        return {"\\": "\n", ",": " ", ";": " ", ":": " ", "!": "", "/": "", "-": "", "@": ""}.get(
            found["symbol"], found["symbol"]
        ), place
    assert kind == "sign"
    return {"---": "—", "--": "–", "``": "“", "''": "”", "~": " ", "}{": " ", "&": "\t"}.get(found[0], ""), place


def _read_command(name: str, source: str, place: int) -> tuple[str, int]:
    if name in _LETTERS:
        if name == "item" and not source.startswith("[]", place):
            place = _skip_options(source, place)
        return _LETTERS[name], place
    place = _skip_options(source, place)
    if name in _WITHOUT_TEXT:
        place = _skip_arguments(source, place, _WITHOUT_TEXT[name])
        return "", place
    if name in ("footnote", "footnotetext") and (argument := _ARGUMENT.match(source, place)):
        return f" ({_to_text(argument[0].strip()[1:-1])})", argument.end()
    if name in ("def", "gdef") and (definition := _DEFINITION.match(source, place)):
        return "", definition.end()
    return "\n\n" if name in _HEADINGS else "", place


def _skip_options(source: str, place: int) -> int:
    while option := _OPTION.match(source, place):
        place = option.end()
    return place


def _skip_arguments(source: str, place: int, count: int) -> int:
    for _ in range(count):
        if (argument := _ARGUMENT.match(source, place)) is None:
            break
        place = argument.end()
    return place
