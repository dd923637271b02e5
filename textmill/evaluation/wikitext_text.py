"""The text of WikiText files: articles, words, and the detokeniser that all published protocols share."""

from __future__ import annotations

import re

LITERAL_FIRST = [
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
]
PAIRED = [
    (r"\(", r"\)", "(", ")"),
    (r"\[", r"\]", "[", "]"),
    ("{", "}", "{", "}"),
    ('"', '"', '"', '"'),
    ("'", "'", "'", "'"),
]
"""Brackets and quotes: white space just inside them is removed."""
LITERAL_LAST = [
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" \u00b0 ", "\u00b0"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
]
TITLE = re.compile(r"^(?= = [^=].*[^=] = $| = [^=] = $)", re.MULTILINE)
"""The first line of an article."""


def detokenize(text: str) -> str:
    """Undo the tokenisation of WikiText: separated punctuation, `@-@`, spaces inside brackets and quotes."""
    for old, new in LITERAL_FIRST:
        text = text.replace(old, new)
    for opening, closing, first, last in PAIRED:
        text = re.sub(rf"{opening}\s*([^{closing}]*?)\s*{closing}", rf"{first}\1{last}", text)
    for old, new in LITERAL_LAST:
        text = text.replace(old, new)
    return text


def split_articles(text: str) -> list[str]:
    """The articles of a file, each from its title line on; text before the first title belongs to the first."""
    parts = TITLE.split(text)
    if len(parts) > 1 and not parts[0].strip():
        parts[:2] = [parts[0] + parts[1]]
    return [part for part in parts if part]


def count_words(text: str) -> int:
    """Words as lm-evaluation-harness counts them: what white space separates, and an empty one at each end that has
    white space."""
    return len(re.split(r"\s+", text))


def count_spaced_words(text: str) -> int:
    """Words as Megatron-LM counts them: what single spaces separate in the stripped text, without the first."""
    return len(text.strip().split(" ")) - 1
