"""Measure each cleaning rule and filter in MB/s on one core, in four languages.

    python bench/clean.py [megabytes]

The text is ../shared/data/LANGUAGE.jsonl.xz next to the repository, else the bundled corpus. bench/corpus.py compares
some of the rules with datatrove's.
"""

from __future__ import annotations

import json
import lzma
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from textmill.config import CorpusConfig
from textmill.config.corpus import PresetName
from textmill.corpus.clean.cleaner import Cleaner
from textmill.corpus.clean.filters import (
    character_fractions,
    find_words,
    repeated_line_fraction,
    repeated_ngram_fraction,
)
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.clean.rules import RULES
from textmill.corpus.clean.sentences import split_sentences
from textmill.corpus.find_sources import bundled_corpora

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LANGUAGES = ("en", "ko", "tr", "zh")
MASKS = {"emails": "[email]", "ips": "[ip]", "ibans": "[iban]", "cards": "[card]", "identity": "[identity]"}
"""Rules that mask personal data; this public text has next to none but e-mail addresses, so that most are false."""
ADDRESS = "93.184.216.34"
WORDS = 200_000
"""Words of the text after which this address is put, to count where it is not masked."""
LIMIT = 4.0
"""Seconds to measure each rule at most."""


def read_texts(language: str, size: int) -> list[str]:
    """About `size` bytes of documents, spread over the file."""
    path = SHARED / f"{language}.jsonl.xz"
    if not path.is_file():
        return [block for block in bundled_corpora()["tinyshakespeare"].read_text(encoding="utf-8").split("\n\n\n")]
    texts, held = [], 0
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        for number, line in enumerate(stream):
            if number % 4 == 0:
                texts.append(json.loads(line)["text"])
                held += len(texts[-1].encode())
            if held >= size:
                break
    return texts


def rate(function: Callable[[str], Any], texts: list[str]) -> tuple[float, float]:
    """MB/s and documents/s in CPU time, so that other work on the machine does not matter."""
    function(texts[0])
    sizes = [len(text.encode()) for text in texts]
    start, done = time.process_time(), 0
    while done < len(texts) and time.process_time() - start < LIMIT:
        function(texts[done])
        done += 1
    seconds = time.process_time() - start
    return sum(sizes[:done]) / 1e6 / seconds, done / seconds


def measured_functions() -> dict[str, Callable[[str], Any]]:
    """The measured functions, by name."""
    presets: dict[str, Callable[[str], Any]] = {
        f"{name} preset": Cleaner(CorpusConfig(preset=name, languages=list(LANGUAGES) if name == "web" else [])).clean
        for name in get_args(PresetName)
        if name != "none"
    }
    return {
        "default rules": Cleaner(CorpusConfig()).clean,
        **presets,
        **RULES,
        "symbols, digits": character_fractions,
        "words": find_words,
        "repeated lines": repeated_line_fraction,
        "repetition": lambda text: (repeated_line_fraction(text), repeated_ngram_fraction(find_words(text))),
        "language": detect_language,
        "sentences": split_sentences,
    }


def main(megabytes: int = 4) -> None:
    """Print one row per rule."""
    texts = {language: read_texts(language, megabytes << 20) for language in LANGUAGES}
    print(f"MB/s on one core{'':<6}" + "".join(f"{language:>8}" for language in LANGUAGES))
    for name, function in measured_functions().items():
        rates = [rate(function, texts[language]) for language in LANGUAGES]
        note = (
            f"   {min(docs for _, docs in rates):,.0f} to {max(docs for _, docs in rates):,.0f} documents/s"
            if name == "language"
            else ""
        )
        print(f"{name:<22}" + "".join(f"{mb:8.1f}" for mb, _ in rates) + note, flush=True)
    for language in LANGUAGES if SHARED.is_dir() else ():
        sample = [text for text in texts[language] if len(text) > 20][:500]
        correct = sum(detect_language(RULES["spaces"](text))[0] == language for text in sample)
        print(f"language of {language}: {correct} of {len(sample)} documents correct")
        joined = "\n\n".join(texts[language])
        masked = {name: RULES[name](joined).count(mask) - joined.count(mask) for name, mask in MASKS.items()}
        print(f"masked in {len(joined) / 1e6:.0f} million characters of {language}: {masked}")
        words = random.Random(1).choices(joined.split(), k=WORDS)
        missed = sum("[ip]" not in RULES["ips"](f"{word} {ADDRESS}") for word in words)
        print(f"addresses missed after {WORDS:,} words of {language}: {missed:,}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
