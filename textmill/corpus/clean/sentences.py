"""Split text into one sentence per line, by the punctuation of many scripts.

Rules and no model: it must keep up with the other cleaning rules, in any language and without a download.
"""

from __future__ import annotations

import re

_OPENERS = "\"'“‘„«‹([{「『（《〈【¿¡*•–—-"
_FULL_STOPS = "。！？｡।॥؟۔።"
"""Marks that end a sentence with or without a following space."""
# The pattern starts with a character class, so that the search skips everything else quickly.
_END = re.compile(rf"[.!?…։{_FULL_STOPS}]+(?P<close>[\"'”’»›)\]}}」』）》〉】]*)(?P<space>\s*)")
_NEXT = re.compile(rf"[{re.escape(_OPENERS)}\s]*(\w+|.)?", re.DOTALL)
_CJK = re.compile("[\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_NO_FULL_STOP = re.compile(f"[^{_FULL_STOPS}]*")
_CONTINUATIONS = frozenset("，、；：,;:…")
_NUMBER_BEFORE = re.compile(r"(?:\A|\n|(?P<word>\S+)\.[ \t]+)[ \t]*\d{1,3}\Z")
_DOTTED_ABBREVIATION = re.compile(r"\w(?:\.\w{1,3})+")
_LINE_STOPS = tuple(".!?…:;" + _FULL_STOPS)
_WRAPPED_WIDTHS = range(50, 101)
"""Typical lengths of a line that was wrapped at a page width."""

ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof st sr jr rev hon gen col lt capt sgt gov sen rep pres messrs mme mlle mt ft vs no nos vol
    fig figs eq eqs ch sec pp p ed eds trans al ca cf viz approx dept est inc ltd co corp bros jan feb mar apr
    jun jul aug sep sept oct nov dec ave blvd rd doç yrd öğr gör av bkz örn sn sok cad mah apt alb yzb tğm müh
    uzm hz şti ltd tel çev haz der г гг ул им т д см рис стр тыс млн млрд руб акад проф доц гл ред изд напр z.b
    d.h u.a bzw nr str abb bd hr fr usw
    """.split()
)
"""Abbreviations whose full stop hardly ever ends a sentence."""
SENTENCE_STARTERS = frozenset(
    "The This That These Those It He She We They I In On At But And However When If There A An His Her Its Our".split()
)
"""Words that start a sentence even after a dotted abbreviation such as U.S."""


def split_sentences(text: str) -> str:
    """Put each sentence on its own line; only white space changes."""
    return keep_lines(_END.sub(_break_after, _unwrap(text)))


def keep_lines(text: str) -> str:
    """Keep the lines, without blank ones and without surrounding spaces."""
    return "\n".join([line for line in map(str.strip, text.split("\n")) if line])


def _unwrap(text: str) -> str:
    """Join wrapped lines: the next line starts in lower case, or the line has a page's width and no end of sentence."""
    if "\n" not in text:
        return text
    lines = text.split("\n")
    parts = [lines[0]]
    previous = lines[0].rstrip()
    for line in lines[1:]:
        first = line.lstrip()[:1]
        if previous and first.islower():
            wrapped = not previous.endswith(_LINE_STOPS)
        else:
            ends_open = len(previous) in _WRAPPED_WIDTHS and (previous[-1].islower() or previous[-1] == ",")
            wrapped = ends_open and first.isalpha()
        parts += [" " if wrapped else "\n", line]
        previous = line.rstrip()
    return "".join(parts)


def _break_after(end: re.Match[str]) -> str:
    """Add a newline after a match if it ends a sentence."""
    matched = end[0]
    return matched + "\n" if _is_sentence_end(end, matched[: end.start("close") - end.start()]) else matched


def _is_sentence_end(end: re.Match[str], marks: str) -> bool:
    """True if punctuation marks that may end a sentence do so."""
    text = end.string
    start = end.start()
    stop = end.end()
    if not end["space"]:
        after = text[stop : stop + 1]
        if not _NO_FULL_STOP.fullmatch(marks):
            return after not in _CONTINUATIONS
        if marks in (".", "…") or marks.startswith(("..", "……")):
            return marks == "." and "가" <= text[start - 1 : start] <= "힣" and "가" <= after <= "힣"
        is_particle = end["close"] and "가" <= after <= "힣"  # a Korean particle belongs to the quotation
        return _CJK.match(after) is not None and not is_particle
    word = _NEXT.match(text, stop)[1] or ""  # type: ignore[index]
    if (word[:1].islower() and not _CJK.match(text, max(start - 1, 0))) or word[:1] in _CONTINUATIONS:
        return False
    return marks != "." or _is_final_full_stop(text, start, word)


def _is_final_full_stop(text: str, start: int, word: str) -> bool:
    """True if the full stop at `start`, followed by white space and `word`, is not part of an abbreviation."""
    before = text[max(0, start - 40) : start]
    last_word = "" if before[-1:].isspace() else before.rsplit(None, 1)[-1].lstrip(_OPENERS) if before else ""
    if last_word.isdecimal():
        number_before = _NUMBER_BEFORE.search(text, max(0, start - 24), start)
        is_list_number = number_before is not None and (number_before["word"] or "").lower() not in ABBREVIATIONS
        return not word[:1].isdigit() and not is_list_number
    if len(last_word) == 1 and last_word.isalpha() and last_word.upper() != last_word.lower():
        return False
    if _DOTTED_ABBREVIATION.fullmatch(last_word):
        return word in SENTENCE_STARTERS and last_word.lower() not in ABBREVIATIONS
    return last_word.lower() not in ABBREVIATIONS


SENTENCE_SPLITTERS = {"split": split_sentences, "lines": keep_lines}
"""The function of each value of `corpus.sentences` that changes the text."""
