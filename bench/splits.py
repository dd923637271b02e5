"""Compare the loss on the valid split with the loss on other text of the same kind, before and after `corpus.split_by`.

    python bench/splits.py

Eight corpora of ../shared/data, each with text of the same kind that is held out by whole works, in the way that a
user's next text would be: the beginning of the one book, other books, other articles, other authors, later posts.
"Before" is `corpus.split_by=document` and `corpus.dedup=exact`, "after" what `textmill new` writes. The gap is the loss
on the held-out text minus the loss on the valid split, in bits per byte; 0 is an honest valid split.

The model counts which bytes follow the last 1 to 6 bytes and mixes these counts (Witten and Bell), so that all of this
takes minutes on one core. It remembers what it has read as a net does that sees a text several times.
"""

from __future__ import annotations

import html
import json
import lzma
import math
import random
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import cache
from itertools import islice
from pathlib import Path
from unittest import mock

from bench.corpus import DATA
from textmill.commands.new import new
from textmill.config import CorpusConfig, RunConfig
from textmill.config.load import read_yaml
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.planning.plan import MachineProfile

SHAKESPEARE = DATA.parent / "tinyshakespeare" / "input.txt"
MACHINE = MachineProfile("cpu", "a CPU", 2, 8 << 30, ((100_000, 2e10), (2_000_000, 4e10)), 10.0)
"""Any: only the settings of the corpus are used."""
CONTEXT = 6
"""The most bytes of context."""
TOTAL = 256
"""Where the count of all bytes after a context is."""
SPLIT = [80.0, 10.0, 10.0]
LONGEST = 60_000
"""Characters that are read of a document."""
Rows = list[dict[str, str]]


def works(source: str, shortest: int = 0) -> Iterator[dict[str, str]]:
    """The beginnings of the documents of a source of the English texts, in their order."""
    return (row for row in _read_works()[source] if len(row["text"]) >= shortest)


@cache
def _read_works() -> dict[str, Rows]:
    found: dict[str, Rows] = defaultdict(list)
    with lzma.open(DATA, "rt", encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            found[row["source"]].append({"id": row["id"], "text": row["text"][:LONGEST]})
    return found


def one_book(folder: Path) -> list[str]:
    """Nine tenths of Shakespeare's plays as one file; held out: the first tenth, which is next to train either way."""
    text = SHAKESPEARE.read_text(encoding="utf-8")
    place = text.index("\n\n", len(text) // 10)
    (folder / "book.txt").write_text(text[place:], encoding="utf-8")
    return [text[:place]]


def many_books(folder: Path) -> list[str]:
    """Passages of sixty books, a file each; held out: ten others."""
    texts = _beginnings("classic_books", 70, 5_000)
    for number, text in enumerate(texts[10:]):
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")
    return texts[:10]


def many_articles(folder: Path) -> list[str]:
    """Parts of a hundred articles, a file each; held out: fifteen others."""
    texts = _beginnings("elife", 115, 5_000)
    for number, text in enumerate(texts[15:]):
        (folder / f"{number:03d}.txt").write_text(text, encoding="utf-8")
    return texts[:15]


def book_records(folder: Path) -> list[str]:
    """Ten books, a record each; held out: three others."""
    texts = _beginnings("gutenberg_text", 13, 25_000)
    _write_rows(folder / "books.jsonl", [{"text": text} for text in texts[3:]])
    return texts[:3]


def documents(folder: Path) -> list[str]:
    """The same as pages of HTML."""
    texts = _beginnings("classic_books", 70, 5_000)
    for number, text in enumerate(texts[10:]):
        paragraphs = "".join(f"<p>{html.escape(one)}</p>\n" for one in text.split("\n\n"))
        page = f"<!DOCTYPE html><html><head><title>{number}</title></head><body><article>{paragraphs}</article></body>"
        (folder / f"{number:02d}.html").write_text(page + "</html>\n", encoding="utf-8")
    return texts[:10]


def authors(folder: Path) -> list[str]:
    """Passages of 24 authors with their name; held out: six other authors."""
    by_author: dict[str, list[str]] = defaultdict(list)
    for row in works("gutenberg_text", shortest=40_000):
        text = row["text"][20_000:32_000]
        by_author[row["id"].split("/")[0]] += [text[start : start + 600] for start in range(0, len(text), 600)]
        if len(by_author) == 30:
            break
    names = sorted(by_author)
    rows = [{"text": text, "author": name} for name in names[6:] for text in by_author[name][:20]]
    random.Random(1).shuffle(rows)
    _write_rows(folder / "passages.jsonl", rows)
    return ["\n".join(by_author[name][:20]) for name in names[:6]]


def news(folder: Path) -> list[str]:
    """Posts of a blog with their year; held out: the latest."""
    posts = []
    for row in works("kubernetes en"):
        if found := re.search(r"/blog/_posts/(\d{4})/", row["id"]):
            posts.append({"date": found[1], "text": row["text"][:3000]})
    posts.sort(key=lambda post: post["date"])
    _write_rows(folder / "posts.jsonl", posts[:-40])
    return [post["text"] for post in posts[-40:]]


def duplicated_pages(folder: Path) -> list[str]:
    """Pages that are stored up to four times, with another date and counter each time; held out: other pages."""
    texts = [row["text"][:2_500] for row in islice(works("mdn en", shortest=2_500), 150)]
    dice = random.Random(1)
    copies = [text for text in texts[30:] for _ in range(dice.choice((1, 1, 2, 4)))]
    rows = [{"text": f"Last change: {dice.randint(2000, 2024)}\n{text}\n{dice.random()} reads"} for text in copies]
    dice.shuffle(rows)
    _write_rows(folder / "pages.jsonl", rows)
    return texts[:30]


CORPORA: dict[str, Callable[[Path], list[str]]] = {
    "one book": one_book,
    "sixty books, a file each": many_books,
    "a hundred articles, a file each": many_articles,
    "ten books, a record each": book_records,
    "sixty books as HTML": documents,
    "passages with their author": authors,
    "posts with their year": news,
    "pages stored several times": duplicated_pages,
}


def _beginnings(source: str, count: int, size: int) -> list[str]:
    """The first characters of works, without what a publisher puts in front."""
    return [row["text"][5_000 : 5_000 + size] for row in islice(works(source, shortest=5_000 + size), count)]


def _write_rows(path: Path, rows: Sequence[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


class ByteModel:
    """Counts of the byte after each context of up to CONTEXT bytes."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        self.counts: list[dict[bytes, dict[int, int]]] = [defaultdict(dict) for _ in range(CONTEXT + 1)]
        for text in texts:
            for place, byte in enumerate(text):
                for length in range(min(place, CONTEXT) + 1):
                    after = self.counts[length][text[place - length : place]]
                    after[byte] = after.get(byte, 0) + 1
                    after[TOTAL] = after.get(TOTAL, 0) + 1

    def bits_per_byte(self, texts: Sequence[bytes]) -> float:
        """The mean loss on texts."""
        bits = 0.0
        for text in texts:
            for place, byte in enumerate(text):
                share = 1 / 256
                for length in range(min(place, CONTEXT) + 1):
                    after = self.counts[length].get(text[place - length : place])
                    if after is None:
                        break
                    share = (after.get(byte, 0) + len(after) * share) / (after[TOTAL] + len(after))
                bits -= math.log2(share)
        return bits / sum(map(len, texts))


def measure(folder: Path, held_out: Sequence[bytes], settings: dict[str, object]) -> tuple[float, float, int]:
    """The loss on the valid split and on the held-out text, and the documents of the train split."""
    corpus = {**settings, "split": SPLIT, "folder": str(folder)}
    made = prepare(RunConfig.model_validate({"corpus": corpus, "runner": {"workers": 1}}))
    train, valid = ([one.text.encode() for one in open_corpus(made, split)] for split in ("train", "valid"))
    model = ByteModel(train)
    return model.bits_per_byte(valid), model.bits_per_byte(held_out), len(train)


def main() -> None:
    """Print a row for each corpus."""
    print(f"{date.today()}: bits per byte of valid and held out, gap; before and after")
    for name, make in CORPORA.items():
        with tempfile.TemporaryDirectory() as place:
            root = Path(place)
            texts = root / "texts"
            texts.mkdir()
            held_out = [text.encode() for text in make(texts)]
            with mock.patch("textmill.commands.new.probe_machine", return_value=MACHINE):
                written = read_yaml(new(str(root / "mine"), str(texts), 1.0))[0]["corpus"]
            same = {key: value for key, value in written.items() if key in CorpusConfig.model_fields}
            same |= {"sources": [str(texts)]}
            before = {key: value for key, value in same.items() if key not in ("split_by", "dedup", "keep_fields")}
            row = [name]
            for label, settings in (("before", before), ("after", same)):
                valid, held, count = measure(root / label, held_out, settings)
                row.append(f"{valid:.3f} {held:.3f} {held - valid:+.3f} ({count:,} train)")
            chosen = ", ".join(f"{key}={same[key]}" for key in ("split_by", "dedup", "cut_records") if key in same)
            print(" | ".join([*row, chosen or "as before"]), flush=True)


if __name__ == "__main__":
    main()
