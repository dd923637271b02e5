"""Checks decode(encode(text)) == text on real documents in four languages, with GPT-2's and a fitted byte-level BPE.

    python bench/roundtrip.py [documents]

The text is ../shared/data/{en,ko,tr,zh}.jsonl.xz next to the repository, split into paragraphs, a quarter of them
in each language.
"""

from __future__ import annotations

import itertools
import json
import lzma
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from textmill.config import TokenizerConfig
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LANGUAGES = ("en", "ko", "tr", "zh")
BATCH = 1000


def read_paragraphs(language: str) -> Iterator[str]:
    """Every paragraph of the file of a language."""
    with lzma.open(SHARED / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
        for line in stream:
            yield from (text for text in json.loads(line)["text"].split("\n\n") if text)


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Group texts into lists of BATCH."""
    while batch := list(itertools.islice(texts, BATCH)):
        yield batch


def check(name: str, tokenizer: TextTokenizer, count: int) -> int:
    """The number of documents that changed, plus end-of-text tokens found in plain text."""
    changed = 0
    for language in LANGUAGES:
        seen = size = tokens = ends = wrong = 0
        start = time.process_time()
        for batch in batches(itertools.islice(read_paragraphs(language), count // len(LANGUAGES))):
            for text, ids in zip(batch, tokenizer.encode_many(batch), strict=True):
                wrong += tokenizer.decode(ids.tolist()) != text
                ends += int((ids == tokenizer.eos_id).sum())
                seen, size, tokens = seen + 1, size + len(text.encode()), tokens + len(ids)
        seconds = time.process_time() - start
        counts = f"{seen:>7,} documents {size / 1e6:7.1f} MB {size / max(tokens, 1):6.2f} bytes/token"
        rate = f"{size / 1e6 / seconds:6.1f} MB/s"
        print(f"{name:<12}{language:<4}{counts} {rate}  changed {wrong}  end-of-text in plain text {ends}", flush=True)
        changed += wrong + ends
    return changed


def main(documents: int = 100_000) -> int:
    """Print a row per language and tokenizer; return the number of changed documents."""
    if not SHARED.is_dir():
        print("no ../shared/data next to the repository: nothing to read")
        return 0
    sample = [text for language in LANGUAGES for text in itertools.islice(read_paragraphs(language), 2000)]
    own = fit(iter([sample]), TokenizerConfig(vocab=16000))
    changed = check("GPT-2's", open_tokenizer(SHARED / "gpt2_bpe"), documents) + check("fitted", own, documents)
    print(f"{changed} of {2 * documents:,} changed")
    return changed


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:]))))
