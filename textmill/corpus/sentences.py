"""A sentence a line: boundaries by punctuation, for Latin, Greek, Cyrillic, CJK, Hangul and some other scripts."""

from __future__ import annotations

import re

_OPENERS = "\"'“‘„«‹([{「『（《〈【¿¡*•–—-"
_FULL_STOPS = "。！？｡।॥؟۔።"
"""Signs that end a sentence with or without a space after them."""
# It begins with a class of signs, so that the search runs over everything else without a look.
_END = re.compile(rf"[.!?…։{_FULL_STOPS}]+(?P<close>[\"'”’»›)\]}}」』）》〉】]*)(?P<space>\s*)")
_NEXT = re.compile(rf"[{re.escape(_OPENERS)}\s]*(\w+|.)?", re.DOTALL)
_CJK = re.compile("[\u1100-\u11ff\u3040-\u30ff\u3130-\u318f\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]")
_NO_FULL_STOP = re.compile(f"[^{_FULL_STOPS}]*")
_CONTINUATIONS = frozenset("，、；：,;:…")
_NUMBER_BEFORE = re.compile(r"(?:\A|\n|(?P<word>\S+)\.[ \t]+)[ \t]*\d{1,3}\Z")
_DOTTED_ABBREVIATION = re.compile(r"\w(?:\.\w{1,3})+")
_LINE_STOPS = tuple(".!?…:;" + _FULL_STOPS)
_WRAPPED_WIDTHS = range(50, 101)
"""How long a line is that was wrapped at the edge of a page."""

ABBREVIATIONS = frozenset((
    "mr mrs ms dr prof st sr jr rev hon gen col lt capt sgt gov sen rep pres messrs mme mlle mt ft vs no nos vol fig figs eq eqs ch sec "
    "pp p ed eds trans al ca cf viz approx dept est inc ltd co corp bros jan feb mar apr jun jul aug sep sept oct nov dec ave blvd rd "
    "doç yrd öğr gör av bkz örn sn sok cad mah apt alb yzb tğm müh uzm hz şti ltd tel çev haz der "
    "г гг ул им т д см рис стр тыс млн млрд руб акад проф доц гл ред изд напр "
    "z.b d.h u.a bzw nr str abb bd hr fr usw"
).split())  # fmt: skip
"""Words with a full stop that hardly ever end a sentence."""
SENTENCE_STARTERS = frozenset(
    "The This That These Those It He She We They I In On At But And However When If There A An His Her Its Our".split()
)
"""Words that begin a sentence even after a word with inner full stops, such as U.S."""


def split_sentences(text: str) -> str:
    """The text with a sentence a line; nothing but white space is ever changed."""
    return keep_lines(_END.sub(_break_after, _unwrap(text)))


def keep_lines(text: str) -> str:
    """The text with its lines as they are, less blank ones and the spaces around each."""
    return "\n".join([line for line in map(str.strip, text.split("\n")) if line])


def _unwrap(text: str) -> str:
    """Wrapped lines put together: the next goes on in lower case, or the line is a page wide and stops in mid-sentence."""
    if "\n" not in text:
        return text
    lines = text.split("\n")
    parts, last_word = [lines[0]], lines[0].rstrip()
    for line in lines[1:]:
        first = line.lstrip()[:1]
        if last_word and first.islower():
            wrapped = not last_word.endswith(_LINE_STOPS)
        else:
            wrapped = (
                len(last_word) in _WRAPPED_WIDTHS
                and (last_word[-1].islower() or last_word[-1] == ",")
                and first.isalpha()
            )
        parts += [" " if wrapped else "\n", line]
        last_word = line.rstrip()
    return "".join(parts)


def _break_after(end: re.Match[str]) -> str:
    """A possible end of a sentence: with a line end after it if it is one."""
    matched = end[0]
    return matched + "\n" if _is_sentence_end(end, matched[: end.start("close") - end.start()]) else matched


def _is_sentence_end(end: re.Match[str], marks: str) -> bool:
    """Whether signs that may end a sentence do."""
    text, start, stop = end.string, end.start(), end.end()
    if not end["space"]:
        after = text[stop : stop + 1]
        if not _NO_FULL_STOP.fullmatch(marks):
            return after not in _CONTINUATIONS
        if marks in (".", "…") or marks.startswith(("..", "……")):
            return marks == "." and "가" <= text[start - 1 : start] <= "힣" and "가" <= after <= "힣"
        return _CJK.match(after) is not None and not (
            end["close"] and "가" <= after <= "힣"
        )  # a particle belongs to the quotation
    word = _NEXT.match(text, stop)[1] or ""  # type: ignore[index]
    if (word[:1].islower() and not _CJK.match(text, max(start - 1, 0))) or word[:1] in _CONTINUATIONS:
        return False
    return marks != "." or _is_final_full_stop(text, start, word)


def _is_final_full_stop(text: str, start: int, word: str) -> bool:
    """Whether the full stop at `start`, with white space and then `word` after it, is more than the mark of an abbreviation."""
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
