"""Replace templates of running text with what a reader sees: measures, foreign words, abbreviations, dashes."""

from __future__ import annotations

import re
from collections.abc import Callable

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
    {
        "nowrap",
        "nobr",
        "small",
        "big",
        "smaller",
        "larger",
        "abbr",
        "tooltip",
        "ill",
        "interlanguage link",
        "val",
        "nihongo",
        "transliteration",
        "translit",
        "key press",
        "sic",
        "strong",
        "em",
        "var",
        "mvar",
        "sup",
        "sub",
        "linktext",
        "native name",
        "visible anchor",
    }
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
