"""Measure how fast documents with n-grams of evaluation data are found, next to plain Python with the same rule.

    python bench/decontaminate.py [megabytes]

The documents are English, Korean and Chinese text of ../shared/data, with some texts of LAMBADA planted in them; the
evaluation data is LAMBADA and the test file of WikiText-2. Both ways must find the same documents.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
import tempfile
import time
from pathlib import Path

from textmill.corpus.decontamination import open_index, write_index
from textmill.evaluation.tasks import open_evaluation_data

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
WIKITEXT, LAMBADA = DATA / "wikitext2" / "test.txt", DATA / "lambada" / "lambada_test.jsonl"
N, LEAST = 13, 8


def main() -> None:
    """Print MB/s of both ways in each language."""
    if not DATA.is_dir():
        sys.exit("no ../shared/data next to the repository: nothing to read")
    size = float(sys.argv[1]) * 1e6 if len(sys.argv) > 1 else 4e6
    data = [open_evaluation_data(f"lambada:{LAMBADA}"), open_evaluation_data(f"wikitext:{WIKITEXT}")]
    secrets = [text for example in data[0].read() for text in example]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write_index(data, Path(folder))
        index = open_index(Path(folder))
        index.find(["é"])  # builds its tables
        print(f"index: {len(index.keys):,} n-grams in {time.perf_counter() - start:.1f} s")
    keys = set().union(*(keys_of(text) for one in data for example in one.read() for text in example))
    for language in ("en", "ko", "zh"):
        documents = plant(read_documents(language, size), secrets)
        octets = sum(len(text.encode()) for text in documents)
        start = time.process_time()
        ours = set(index.find(documents)[0].tolist())
        middle = time.process_time()
        found = {number for number, text in enumerate(documents) if keys & runs_of(text)}
        plain = time.process_time() - middle
        if language != "zh" and found != ours:  # in Chinese a character is a word for us, a sentence for \w+
            sys.exit(f"{language}: {len(ours)} documents, plain Python finds {len(found)}")
        speeds = [octets / 1e6 / seconds for seconds in (middle - start, plain)]
        print(
            f"{language}: {len(ours)} of {len(documents)} documents; {speeds[0]:.1f} MB/s, Python {speeds[1]:.2f} MB/s"
        )


def read_documents(language: str, size: float) -> list[str]:
    """About `size` bytes of documents."""
    documents: list[str] = []
    with lzma.open(DATA / f"{language}.jsonl.xz", "rt", encoding="utf-8") as lines:
        for line in lines:
            documents.append(json.loads(line)["text"])
            size -= len(documents[-1].encode())
            if size < 0:
                break
    return documents


def plant(documents: list[str], secrets: list[str]) -> list[str]:
    """Put an evaluation text into the middle of every tenth document."""
    dice = random.Random(1)
    planted = list(documents)
    for number in range(0, len(planted), 10):
        text = planted[number]
        planted[number] = f"{text[: len(text) // 2]} {dice.choice(secrets)} {text[len(text) // 2 :]}"
    return planted


def keys_of(text: str) -> set[tuple[str, ...]]:
    """Megatron-LM's keys of an evaluation text."""
    words = re.findall(r"\w+", text.lower())
    if len(words) < N:
        return {tuple(words)} if len(words) >= LEAST else set()
    return {tuple(words[start : start + N]) for start in range(len(words) - N + 1)}


def runs_of(text: str) -> set[tuple[str, ...]]:
    """All runs of 13 words of a document; LAMBADA and WikiText have no shorter keys."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[start : start + N]) for start in range(len(words) - N + 1)}


if __name__ == "__main__":
    main()
