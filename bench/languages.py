"""Measure how often the language of a text is found, in four languages, with samples of two lengths.

    python bench/languages.py [documents]      default: 1000 of each language

The text is ../shared/data/LANGUAGE.jsonl.xz next to the repository. A sample is cut from the middle of a document, and
documents that are shorter are left out.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from textmill.corpus.clean.languages import detect_language

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LANGUAGES = ("en", "ko", "tr", "zh")
LENGTHS = (1000, 100)
"""Characters of a sample."""


def main() -> None:
    """Print a line for each language and length."""
    documents = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for language in LANGUAGES:
        with lzma.open(SHARED / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
            texts = (json.loads(line)["text"] for line in stream)
            long_texts = list(islice((text for text in texts if len(text) >= max(LENGTHS)), documents))
        for length in LENGTHS:
            starts = [(len(text) - length) // 2 for text in long_texts]
            found = Counter(
                detect_language(text[start : start + length])[0] for text, start in zip(long_texts, starts, strict=True)
            )
            others = ", ".join(f"{name} {count}" for name, count in found.most_common(4) if name != language)
            right = f"{found[language] / len(long_texts):.1%} of {len(long_texts):,}"
            print(f"{language}, {length:,} characters: {right} (else {others or 'none'})", flush=True)


if __name__ == "__main__":
    main()
