"""Speed of cleaning and near-deduplication against datatrove in the same run, and peak memory of `prepare` on 1, 2 and 4 times the input.

    python bench/corpus.py [MB] [workers] [python that has datatrove with its extras io and processing, ftfy and spacy]

The last may also stand in DATATROVE_PYTHON; without it textmill alone is measured. The text is ../shared/data/en.jsonl.xz,
decompressed, in documents of at most 20,000 characters; where that is too little, it comes again with the words of each document shuffled.

Equal in cleaning: one core, texts in memory, ftfy's mending of encodings, masked e-mail addresses, a document dropped where more than
0.3 of its characters stand in repeated lines or in repeated runs of ten words, words being what stands between white space. Not
equal: ours runs its rules until none finds work, shows ftfy only the lines that can be wrong, and counts characters of overlapping
runs once. Equal in near-deduplication: the same files, processes and cores, shingles of five words, as many bands and rows; both end
with Parquet files of what is kept. Not equal: ours also hashes its input, cuts three splits and confirms each pair by its true Jaccard
similarity. "white space": datatrove with our words, lower case and between white space; "spacy": as it comes, with spacy's words, and
without punctuation, accents and numbers.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import count, islice
from pathlib import Path
from typing import Any

from textmill.config import CorpusConfig
from textmill.corpus.clean import Cleaner
from textmill.corpus.dedup.minhash import choose_bands

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "en.jsonl.xz"
CUT = 20_000
"""Characters of a document at most."""
CLEANED = 16
"""MB that are cleaned on one core."""
SHARE, THRESHOLD, WORDS = 0.3, 0.8, 5
FLAT = 1.2
"""The peak on 4 times the input over that on the input."""

PEER_CLEANS = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import gopher_repetition_filter as repetition
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter
repetition.split_into_words = lambda text, language: text.split()
names = "unescape_html remove_terminal_escapes fix_latin_ligatures fix_character_width uncurl_quotes fix_line_breaks remove_control_chars"
mend = FTFYFormatter(**dict.fromkeys(names.split(), False), normalization=None)
mask = PIIFormatter(remove_ips=False, email_replacement="[email]")
share = float(sys.argv[2])
judge = repetition.GopherRepetitionFilter(None, None, share, None, (), ((10, share),))
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
start, kept = time.process_time(), 0
for text in texts:
    kept += judge.filter(Document(text=mask.format(mend.format(text)), id="0")) is True
print(json.dumps([time.process_time() - start, kept]))
"""
PEER_NEAR = """
import sys
from types import SimpleNamespace
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, MinhashDedupSignature
from datatrove.pipeline.dedup import minhash
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.parquet import ParquetWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
class Signature(MinhashDedupSignature):
    def run(self, *words, **named):
        if sys.argv[7] == "white space":
            self.word_tokenizer = SimpleNamespace(word_tokenize=str.split)
        return super().run(*words, **named)
if __name__ == "__main__":
    texts, place, (workers, n, bands, rows) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:7])
    names = "remove_punctuation norm_unicode_diacritics norm_numbers norm_weekdays norm_monthnames"
    norm = TextNormConfig(**dict.fromkeys(names.split(), False)) if sys.argv[7] == "white space" else TextNormConfig()
    config = minhash.MinhashConfig(n, bands, rows, hash_config=HashConfig(precision=64), norm_config=norm)
    def run(name, tasks, *steps):
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=f"{place}/{name}").run()
    run("one", workers, JsonlReader(texts), Signature(output_folder=place + "/signatures", config=config))
    run("two", bands, MinhashDedupBuckets(input_folder=place + "/signatures", output_folder=place + "/buckets", config=config))
    run("three", 1, MinhashDedupCluster(input_folder=place + "/buckets", output_folder=place + "/remove", config=config))
    run("four", workers, JsonlReader(texts), MinhashDedupFilter(input_folder=place + "/remove"), ParquetWriter(place + "/kept"))
"""


def documents(path: Path = DATA) -> Iterator[str]:
    """Documents without end: after the first time the words of each are shuffled, so that none is a copy, near or exact."""
    for turn in count():
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream):
                text = json.loads(line)["text"]
                for start in range(0, len(text), CUT):
                    yield (
                        shuffled(text[start : start + CUT], f"{turn}.{number}.{start}")
                        if turn
                        else text[start : start + CUT]
                    )


def shuffled(text: str, seed: str) -> str:
    """The same words in another order."""
    words = text.split(" ")
    random.Random(seed).shuffle(words)
    return " ".join(words)


def write_files(folder: Path, megabytes: float, files: int) -> tuple[float, int]:
    """So many MB of text as JSON lines, dealt out to files; MB and documents that they became."""
    folder.mkdir(parents=True)
    total = number = 0
    streams = [open(folder / f"{place:03d}.jsonl", "w", encoding="utf-8") for place in range(files)]
    for number, text in enumerate(documents(), 1):
        streams[number % files].write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
        total += len(text.encode())
        if total >= megabytes * 1e6:
            break
    for stream in streams:
        stream.close()
    return total / 1e6, number


@dataclass(frozen=True)
class Run:
    """A command that came to its end."""

    seconds: float
    peak: float
    """MB of all its processes together, memory that they share counted once."""
    cpu: float
    """Seconds of processor time of all its processes, as last seen: nearly the same on a busy machine."""
    said: str


def seconds_of(pid: int) -> float:
    """A process's processor time; not the system's count of a parent's children, which leaves out those that nobody waited for."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def run(command: list[str], pause: float = 0.1) -> Run:
    """Run a command and look at its memory every so many seconds."""
    start, peak, used = time.perf_counter(), 0.0, dict[int, float]()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        while process.poll() is None:
            family = family_of(process.pid)
            peak = max(peak, sum(map(megabytes_of, family)))
            used.update((pid, max(seconds_of(pid), used.get(pid, 0.0))) for pid in family)
            time.sleep(pause)
        seconds = time.perf_counter() - start
        said.seek(0)
        words = said.read()
    assert process.returncode == 0, words[-3000:]
    return Run(seconds, peak, sum(used.values()), words)


def family_of(pid: int) -> list[int]:
    """A process and all below it."""
    try:
        below = [
            child for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
        ]
    except OSError:
        below = []
    return [pid, *(other for child in below for other in family_of(int(child)))]


def megabytes_of(pid: int) -> float:
    """A process's proportional share of memory."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def prepare(texts: Path, place: Path, workers: int, dedup: str, **settings: object) -> Run:
    """One `textmill prepare` without cleaning rules."""
    corpus = {"sources": texts, "dedup": dedup, "rules": "[]", **settings}
    words = [
        f"folder={place}",
        f"runner.workers={workers}",
        *(f"corpus.{key}={value}" for key, value in corpus.items()),
    ]
    return run([sys.executable, "-m", "textmill", "prepare", "quickstart", *words])


def compare_cleaning(place: Path, python: str | None) -> None:
    """MB/s of the same rules on one core."""
    total, number = write_files(place / "few", min(CLEANED, 200), 1)
    texts = list(islice(documents(), number))
    cleaner = Cleaner(CorpusConfig(rules=["repair", "emails"], max_repeated_lines=SHARE, max_repeated_words=SHARE))
    cleaner.clean(texts[0])
    start = time.process_time()
    kept = sum(cleaner.clean(text) is not None for text in texts)
    ours = time.process_time() - start
    print(
        f"cleaning, {total:.1f} MB, {number:,} documents, one core\n  textmill   {total / ours:8.2f} MB/s, {kept:,} kept",
        flush=True,
    )
    if python:
        script = written(place / "clean.py", PEER_CLEANS)
        said = run([python, script, str(place / "few" / "000.jsonl"), str(SHARE)], 1).said
        theirs, kept = json.loads(said.splitlines()[-1])
        print(f"  datatrove  {total / theirs:8.2f} MB/s, {kept:,} kept: ratio {theirs / ours:.1f}", flush=True)


def compare_near(place: Path, texts: Path, total: float, workers: int, python: str | None) -> None:
    """MB/s of near-deduplication with the same sketches."""
    bands, rows = choose_bands(THRESHOLD)
    print(
        f"near-duplicates, {total:.1f} MB, {workers} workers, shingles of {WORDS} words, {bands} bands of {rows} values"
    )
    settings: dict[str, Any] = {"dedup_shingles": "words", "dedup_shingle_size": WORDS, "dedup_threshold": THRESHOLD}
    ours = prepare(texts, place / "ours", workers, "near", **settings)
    print(
        f"  textmill               {total / ours.seconds:7.2f} MB/s, {ours.cpu:,.0f} s of processors, peak {ours.peak:,.0f} MB",
        flush=True,
    )
    script = written(place / "near.py", PEER_NEAR)
    for words in ("white space", "spacy") if python else ():
        folder = place / f"theirs {words}"
        theirs = run([str(python), script, str(texts), str(folder), *map(str, (workers, WORDS, bands, rows)), words])
        ratios = f"ratio {theirs.seconds / ours.seconds:.1f}, of processor time {theirs.cpu / ours.cpu:.1f}"
        told = f"{total / theirs.seconds:7.2f} MB/s, {theirs.cpu:,.0f} s of processors, peak {theirs.peak:,.0f} MB: {ratios}"
        print(f"  datatrove, {words:<11} {told}", flush=True)


def measure_memory(place: Path, megabytes: int, workers: int) -> bool:
    """Peaks of `prepare` as it comes on 1, 2 and 4 times the input; whether they are flat."""
    peaks: dict[str, list[float]] = {"exact": [], "near": []}
    for times in (1, 2, 4):
        total, number = write_files(place / f"texts{times}", megabytes * times, 2 * workers * times)
        for dedup, seen in peaks.items():
            done = prepare(place / f"texts{times}", place / f"{dedup}{times}", workers, dedup)
            seen.append(done.peak)
            rate = f"{total / done.seconds:6.2f} MB/s, peak {done.peak:,.0f} MB of all processes together"
            print(f"  {dedup:<6} {total:7.1f} MB, {number:>7,} documents: {rate}", flush=True)
    flat = all(seen[-1] <= FLAT * seen[0] for seen in peaks.values())
    print(
        f"  4 times the input takes {', '.join(f'{seen[-1] / seen[0]:.2f} ({name})' for name, seen in peaks.items())} times the memory"
    )
    return flat


def written(path: Path, script: str) -> str:
    """A script on disk."""
    path.write_text(script)
    return str(path)


def main(megabytes: int = 55, workers: int = 2, python: str | None = None) -> int:
    """All comparisons; its figures go to docs/benchmarks.md."""
    python = python or os.environ.get("DATATROVE_PYTHON")
    print(
        f"{date.today()}, {len(os.sched_getaffinity(0))} {platform.machine()} cores, Python {platform.python_version()}",
        flush=True,
    )
    if python:
        version = "from importlib.metadata import version as v; print(*(f'{name} {v(name)}' for name in ('datatrove', 'ftfy', 'spacy')))"
        print(run([python, "-c", version]).said.strip())
    else:
        print(
            "datatrove is missing, textmill alone is measured; name a python that has it as the third word or in DATATROVE_PYTHON"
        )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        compare_cleaning(place, python)
        total, _ = write_files(place / "texts", megabytes, 2 * workers)
        compare_near(place, place / "texts", total, workers, python)
        print("peak memory of prepare, shingles of 5 characters")
        return 0 if measure_memory(place, megabytes, workers) else 1


if __name__ == "__main__":
    number, more, *rest = [*sys.argv[1:], *("55", "2")[len(sys.argv[1:]) :]]
    sys.exit(main(int(number), int(more), *rest))
