"""Damage documents at random, and count what is kept of them that is not in the original.

    python bench/documents.py [damages] [seed]

The originals are the files of tests/corpus/documents, which LibreOffice and pandoc wrote from mill.md, and mail, a web
archive, subtitles, code, tables and JSON with the same text. Files are read in other processes: a crash or a hang is
counted too. Damage that nothing in a file shows (flipped bits in a format without checksums) is counted separately.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import re
import signal
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.damage import damage_document
from textmill.config import CorpusConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.records import BadRecord
from textmill.corpus.source import SourceChunk
from textmill.errors import TextmillError

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "corpus" / "documents"
HANG_SECONDS = 60
"""Reading a document of a page takes a few milliseconds of a busy machine."""


class Outcome(NamedTuple):
    """What was read of a damaged file."""

    kind: str
    """What the file was, and how it was damaged."""
    result: str
    """kept, quarantined, refused, or the name of an error."""
    is_revealed: bool
    words: int
    foreign: list[str]
    """Kept words that the original has not."""


def originals() -> dict[str, bytes]:
    """The undamaged files, by name."""
    found = {path.name: path.read_bytes() for path in sorted(FOLDER.glob("mill.*"))}
    text = (FOLDER / "mill.md").read_text(encoding="utf-8")
    page = found["mill.html"]
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + page
    warc = (
        b"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: http://a.example/\r\nContent-Length: %d\r\n\r\n%s\r\n\r\n"
    )
    mail = (
        f"From a@b.example Mon Jan  1 10:00:00 2024\nSubject: mill\nContent-Type: text/plain; charset=utf-8\n\n{text}\n"
    )
    blocks = text.split("\n\n")
    cues = [
        f"{number}\n00:00:{number:02d},000 --> 00:00:{number:02d},900\n{one}\n" for number, one in enumerate(blocks, 1)
    ]
    rows = "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in blocks).encode()
    table = io.StringIO()
    csv.writer(table).writerows([["text"], *([one] for one in blocks)])
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": blocks}), parquet, write_page_checksum=True)
    found |= {
        "mill.jsonl": rows,
        "mill.jsonl.gz": gzip.compress(rows),
        "mill.csv": table.getvalue().encode(),
        "mill.parquet": parquet.getvalue(),
        "mill.warc": warc % (len(http), http),
        "mill.mbox": mail.encode() * 2,
        "mill.srt": "\n".join(cues).encode(),
        "mill.py": Path(__file__).read_bytes(),
    }
    return found


def words(text: str) -> list[str]:
    """The words of a text."""
    return re.findall(r"\w+", text)


def read_damaged(number: int, seed: int) -> Outcome:
    """Damage and read one file, the same for each number and seed."""
    dice = random.Random(f"{seed} {number}")
    files = originals()
    name = sorted(files)[number % len(files)]
    damage = damage_document(files[name], name, dice)
    kind = f"{name.partition('.')[2]}, {damage.kind if ' as ' not in damage.kind else 'extension'}"
    known = {word for one in _read(name, files[name]) for word in words(one)}
    raw = gzip.decompress(files[name]) if name.endswith(".gz") else files[name]
    known.update(words(raw.decode(errors="ignore")))
    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(HANG_SECONDS)
    try:
        kept = _read(damage.name, damage.data)
    except TextmillError:
        return Outcome(kind, "refused", damage.is_revealed, 0, [])
    except TimeoutError:
        return Outcome(kind, "hang", damage.is_revealed, 0, [])
    except Exception as error:  # what this script looks for
        return Outcome(kind, f"error {type(error).__name__}: {error}", damage.is_revealed, 0, [])
    finally:
        signal.alarm(0)
    found = [word for one in kept for word in words(one)]
    foreign = [word for word in found if word not in known]
    return Outcome(kind, "kept" if found else "quarantined", damage.is_revealed, len(found), foreign)


def _read(name: str, data: bytes) -> list[str]:
    config = CorpusConfig(documents="file")
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        chunks = split_into_chunks(find_sources([str(path)]), config.documents)
        records = [record for chunk in chunks for record in _read_chunk(chunk, config)]
    return [record.text for record in records if isinstance(record, Document)]


def _read_chunk(chunk: SourceChunk, config: CorpusConfig) -> list[Document | BadRecord]:
    """What `prepare` keeps: where a checksum fails, a second attempt reads what is certainly before the damage."""
    records = list(read_records(chunk, config))
    damage = next((one.damage for one in records if isinstance(one, BadRecord) and one.damage), None)
    if damage is None:
        return records
    return list(read_records(chunk._replace(source=chunk.source._replace(damage=damage)), config))


def _hang(*_: object) -> None:
    raise TimeoutError


def main(damages: int = 2000, seed: int = 1) -> None:
    """Print one row per kind of damage."""
    results: list[Outcome] = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        pending = [pool.submit(read_damaged, number, seed) for number in range(damages)]
        for number, one in enumerate(pending):
            try:
                results.append(one.result())
            except BrokenProcessPool:
                raise SystemExit(f"a process died at damage {number} or soon after, seed {seed}") from None
    for label, is_revealed in (("damage that a file shows", True), ("damage that nothing in a file shows", False)):
        part = [one for one in results if one.is_revealed == is_revealed]
        total = sum(one.words for one in part)
        foreign = sum(len(one.foreign) for one in part)
        counts = Counter(one.result.partition(" ")[0] for one in part)
        print(f"{label}: {len(part):,} files, {dict(counts)}; {foreign:,} of {total:,} kept words are foreign", end="")
        by_kind: Counter[str] = Counter()
        for one in part:
            by_kind[one.kind] += len(one.foreign)
        print(f" ({foreign / max(1, total):.3%}): {dict(by_kind.most_common(6))}")
    for outcome in results:
        if outcome.result.startswith(("error", "hang")) or (outcome.is_revealed and len(outcome.foreign) > 1):
            print(f"  {outcome.kind}: {outcome.result}, foreign: {outcome.foreign[:8]}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
