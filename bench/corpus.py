"""Compare cleaning, near-duplicate removal and many small files with datatrove; measure the peak memory of `prepare`.

    python bench/corpus.py [MB] [workers] [a Python with datatrove and its extras io and processing, ftfy and spacy]
    python bench/corpus.py files [documents] [workers] [a Python with datatrove]

DATATROVE_PYTHON may name that Python too; without it only textmill is measured. Memory is measured on 1, 2 and 4 times
the input. The text is ../shared/data/en.jsonl.xz, decompressed, in documents of at most 20,000 characters. If that is
too little, it is repeated with the words of each document shuffled.

Cleaning, equal: one core, texts in memory, ftfy's repair of encodings, masked e-mail addresses. A document is dropped
if more than 0.3 of its characters are in repeated lines or in repeated runs of ten words; words are separated by white
space. Different: textmill repeats its rules until nothing changes, passes ftfy only the lines that may be wrong, and
counts the characters of overlapping runs once.

Near-duplicates, equal: the same files, processes and cores, shingles of five words, the same number of bands and rows;
both write Parquet files of the kept documents. Different: textmill also hashes its input, writes three splits and
confirms each pair by its true Jaccard similarity. "white space": datatrove with textmill's words, in lower case and
separated by white space. "spacy": datatrove's defaults, with spacy's words, without punctuation, accents and numbers.

`files`: the same documents of about 250 bytes as one file of JSON lines, as a tenth as many such files of ten lines, as
a text file each, and both of these in a zip; `prepare`, `fit-tokenizer` and `tokenize`. Next to them a plain Python
loop with the default rules, exact duplicates and splits, and datatrove, which cleans nothing; both write Parquet files.
Compare CPU seconds on a busy machine.
"""

from __future__ import annotations

import json
import lzma
import os
import platform
import random
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from datetime import date
from itertools import count, islice
from pathlib import Path
from typing import Any

from bench.measured_process import Run, run
from textmill.config import CorpusConfig
from textmill.corpus.clean.cleaner import Cleaner
from textmill.corpus.dedup.minhash import choose_bands
from textmill.corpus.dedup.near_duplicates import SHINGLE_SIZE

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "en.jsonl.xz"
MAX_CHARACTERS = 20_000
"""The most characters in a document."""
CLEANING_MB = 16
"""MB cleaned on one core."""
MAX_REPEATED, THRESHOLD, SHINGLE_WORDS = 0.3, 0.8, SHINGLE_SIZE
MAX_PEAK_RATIO = 1.2
"""The highest allowed ratio of the peak on 4 times the input to the peak on the input."""

DATATROVE_CLEANING = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import gopher_repetition_filter as repetition
from datatrove.pipeline.formatters import FTFYFormatter, PIIFormatter
repetition.split_into_words = lambda text, language: text.split()
names = "unescape_html remove_terminal_escapes fix_latin_ligatures fix_character_width uncurl_quotes fix_line_breaks"
names += " remove_control_chars"
repair = FTFYFormatter(**dict.fromkeys(names.split(), False), normalization=None)
mask = PIIFormatter(remove_ips=False, email_replacement="[email]")
fraction = float(sys.argv[2])
quality = repetition.GopherRepetitionFilter(None, None, fraction, None, (), ((10, fraction),))
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
start, kept = time.process_time(), 0
for text in texts:
    kept += quality.filter(Document(text=mask.format(repair.format(text)), id="0")) is True
print(json.dumps([time.process_time() - start, kept]))
"""
DATATROVE_NEAR = """
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
    def run(self, *args, **kwargs):
        if sys.argv[7] == "white space":
            self.word_tokenizer = SimpleNamespace(word_tokenize=str.split)
        return super().run(*args, **kwargs)
if __name__ == "__main__":
    texts, place, (workers, n, bands, rows) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:7])
    names = "remove_punctuation norm_unicode_diacritics norm_numbers norm_weekdays norm_monthnames"
    norm = TextNormConfig(**dict.fromkeys(names.split(), False)) if sys.argv[7] == "white space" else TextNormConfig()
    config = minhash.MinhashConfig(n, bands, rows, hash_config=HashConfig(precision=64), norm_config=norm)
    def run(name, tasks, *steps):
        LocalPipelineExecutor(list(steps), tasks=tasks, workers=workers, logging_dir=f"{place}/{name}").run()
    run("one", workers, JsonlReader(texts), Signature(output_folder=place + "/signatures", config=config))
    signatures, buckets, remove = place + "/signatures", place + "/buckets", place + "/remove"
    run("two", bands, MinhashDedupBuckets(input_folder=signatures, output_folder=buckets, config=config))
    run("three", 1, MinhashDedupCluster(input_folder=buckets, output_folder=remove, config=config))
    run("four", workers, JsonlReader(texts), MinhashDedupFilter(input_folder=remove), ParquetWriter(place + "/kept"))
"""
DATATROVE_FILES = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers.parquet import ParquetWriter
if __name__ == "__main__":
    texts, place, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
    steps = [JsonlReader(texts), ParquetWriter(place + "/kept")]
    LocalPipelineExecutor(steps, tasks=workers, workers=workers, logging_dir=place + "/logs").run()
"""
LOOP = """
import hashlib, json, re, sys, unicodedata
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
spaces, controls = re.compile(r"[ \\t]+$", re.M), re.compile(r"[\\x00-\\x08\\x0b-\\x1f\\x7f]")
place = Path(sys.argv[1])
files = sorted(place.iterdir()) if place.is_dir() else [place]
def texts():
    for path in files:
        with open(path, encoding="utf-8") as stream:
            if path.suffix == ".txt":
                yield stream.read(), path.name, "file"
            else:
                for number, line in enumerate(stream, 1):
                    yield json.loads(line)["text"], path.name, f"line {number}"
rows, seen = ([], [], []), set()
for text, name, line in texts():
    text = unicodedata.normalize("NFC", text.replace("\\r\\n", "\\n").replace("\\r", "\\n"))
    text = re.sub("\\n{3,}", "\\n\\n", spaces.sub("", controls.sub("", text))).strip()
    digest = hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()
    if text and digest not in seen:
        seen.add(digest)
        share = int.from_bytes(digest[:8], "big") / 2**64
        rows[0 if share < 0.9 else 1 if share < 0.95 else 2].append((text, name, line))
for number, part in enumerate(rows):
    if part:
        columns = [pa.array(column) for column in zip(*part)]
        table = pa.table(columns, names=["text", "source", "id"])
        pq.write_table(table, f"{sys.argv[2]}-{number}.parquet", compression="zstd")
"""
LINES_PER_FILE = 10
SMALL_CHARACTERS = 250
"""The length of a small document."""
STAGES = ("prepare", "fit-tokenizer", "tokenize")
MAX_LAYOUT_RATIO = 1.5
"""The highest allowed ratio of the CPU time of small files to that of one file."""


def documents(path: Path = DATA) -> Iterator[str]:
    """Yield documents endlessly; from the second pass on, the words of each are shuffled, so that no duplicates
    appear."""
    for round_number in count():
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            for number, line in enumerate(stream):
                text = json.loads(line)["text"]
                for start in range(0, len(text), MAX_CHARACTERS):
                    yield (
                        shuffle_words(text[start : start + MAX_CHARACTERS], f"{round_number}.{number}.{start}")
                        if round_number
                        else text[start : start + MAX_CHARACTERS]
                    )


def shuffle_words(text: str, seed: str) -> str:
    """The same words in another order."""
    words = text.split(" ")
    random.Random(seed).shuffle(words)
    return " ".join(words)


def write_files(folder: Path, megabytes: float, files: int) -> tuple[float, int]:
    """Write text as JSON lines, distributed over files; return the MB and documents written."""
    folder.mkdir(parents=True)
    total = number = 0
    streams = [open(folder / f"{file_number:03d}.jsonl", "w", encoding="utf-8") for file_number in range(files)]
    for number, text in enumerate(documents(), 1):
        streams[number % files].write(json.dumps({"id": str(number), "text": text}, ensure_ascii=False) + "\n")
        total += len(text.encode())
        if total >= megabytes * 1e6:
            break
    for stream in streams:
        stream.close()
    return total / 1e6, number


def prepare(texts: Path, folder_path: Path, workers: int, dedup: str, **settings: object) -> Run:
    """Run `textmill prepare` without cleaning rules."""
    corpus = {"sources": texts, "dedup": dedup, "rules": "[]", **settings}
    words = [
        f"folder={folder_path}",
        f"runner.workers={workers}",
        *(f"corpus.{key}={value}" for key, value in corpus.items()),
    ]
    return run([sys.executable, "-m", "textmill", "prepare", "quickstart", *words])


def compare_cleaning(folder_path: Path, python: str | None) -> None:
    """Compare the same rules on one core, in MB/s."""
    total, number = write_files(folder_path / "few", min(CLEANING_MB, 200), 1)
    texts = list(islice(documents(), number))
    cleaner = Cleaner(
        CorpusConfig(rules=["repair", "emails"], max_repeated_lines=MAX_REPEATED, max_repeated_words=MAX_REPEATED)
    )
    cleaner.clean(texts[0])
    start = time.process_time()
    kept = sum(cleaner.clean(text) is not None for text in texts)
    textmill_seconds = time.process_time() - start
    print(
        f"cleaning, {total:.1f} MB, {number:,} documents, one core\n"
        f"  textmill   {total / textmill_seconds:8.2f} MB/s, {kept:,} kept",
        flush=True,
    )
    if python:
        script = write_script(folder_path / "clean.py", DATATROVE_CLEANING)
        output = run([python, script, str(folder_path / "few" / "000.jsonl"), str(MAX_REPEATED)], 1).output
        datatrove_seconds, kept = json.loads(output.splitlines()[-1])
        print(
            f"  datatrove  {total / datatrove_seconds:8.2f} MB/s, {kept:,} kept: "
            f"ratio {datatrove_seconds / textmill_seconds:.1f}",
            flush=True,
        )


def compare_near(folder_path: Path, texts: Path, total: float, workers: int, python: str | None) -> None:
    """Compare near-duplicate removal with the same sketches, in MB/s."""
    bands, rows = choose_bands(THRESHOLD)
    print(
        f"near-duplicates, {total:.1f} MB, {workers} workers, shingles of {SHINGLE_WORDS} words, "
        f"{bands} bands of {rows} values"
    )
    settings: dict[str, Any] = {"dedup_shingles": "words", "dedup_threshold": THRESHOLD}
    textmill_run = prepare(texts, folder_path / "textmill", workers, "near", **settings)
    print(
        f"  textmill               {total / textmill_run.seconds:7.2f} MB/s, {textmill_run.cpu:,.0f} s of CPU, "
        f"peak {textmill_run.peak:,.0f} MB",
        flush=True,
    )
    script = write_script(folder_path / "near.py", DATATROVE_NEAR)
    for words in ("white space", "spacy") if python else ():
        folder = folder_path / f"datatrove {words}"
        datatrove = run(
            [str(python), script, str(texts), str(folder), *map(str, (workers, SHINGLE_WORDS, bands, rows)), words]
        )
        time_ratio, cpu_ratio = datatrove.seconds / textmill_run.seconds, datatrove.cpu / textmill_run.cpu
        result = f"{total / datatrove.seconds:7.2f} MB/s, {datatrove.cpu:,.0f} s of CPU, peak {datatrove.peak:,.0f} MB"
        result += f": ratio {time_ratio:.1f}, CPU time ratio {cpu_ratio:.1f}"
        print(f"  datatrove, {words:<11} {result}", flush=True)


def compare_loop(folder: Path, megabytes: float) -> None:
    """Compare one file and one process with a plain loop that has the same rules."""
    total, number = write_files(folder / "one", megabytes, 1)
    file = folder / "one" / "000.jsonl"
    own = prepare(file, folder / "prepared", 1, "exact", rules="[unicode,newlines,controls,spaces]")
    loop = run([sys.executable, write_script(folder / "loop.py", LOOP), str(file), str(folder / "loop")])
    print(f"one file of {total:.1f} MB, {number:,} documents, one process, the default rules")
    for name, one in (("textmill", own), ("a plain loop", loop)):
        print(f"  {name:<13} {one.cpu:6.1f} s of CPU, {one.seconds:.1f} s, peak {one.peak:,.0f} MB", flush=True)


def measure_memory(folder_path: Path, megabytes: int, workers: int) -> bool:
    """Measure the peak memory of `prepare` on 1, 2 and 4 times the input; return whether it is constant."""
    peaks: dict[str, list[float]] = {"exact": [], "near": []}
    for times in (1, 2, 4):
        total, number = write_files(folder_path / f"texts{times}", megabytes * times, 2 * workers * times)
        for dedup, seen in peaks.items():
            done = prepare(folder_path / f"texts{times}", folder_path / f"{dedup}{times}", workers, dedup)
            seen.append(done.peak)
            rate = f"{total / done.seconds:6.2f} MB/s, peak {done.peak:,.0f} MB of all processes together"
            print(f"  {dedup:<6} {total:7.1f} MB, {number:>7,} documents: {rate}", flush=True)
    is_constant = all(seen[-1] <= MAX_PEAK_RATIO * seen[0] for seen in peaks.values())
    print(
        "  4 times the input takes "
        f"{', '.join(f'{seen[-1] / seen[0]:.2f} ({name})' for name, seen in peaks.items())} times the memory"
    )
    return is_constant


def write_layouts(folder: Path, count: int) -> dict[str, Path]:
    """Write the same documents as one file, as many files and as archives; return where each is."""
    texts = []
    for text in documents():
        words = " ".join(text.split())
        texts += [words[start : start + SMALL_CHARACTERS] for start in range(0, len(words), SMALL_CHARACTERS)]
        if len(texts) >= count:
            break
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts[:count]]
    few, many = folder / f"{count // LINES_PER_FILE} files", folder / f"{count} files"
    few.mkdir(parents=True)
    many.mkdir()
    (folder / "one.jsonl").write_text("".join(lines), encoding="utf-8")
    for start in range(0, count, LINES_PER_FILE):
        (few / f"{start:07d}.jsonl").write_text("".join(lines[start : start + LINES_PER_FILE]), encoding="utf-8")
    for number, text in enumerate(texts[:count]):
        (many / f"{number:07d}.txt").write_text(text, encoding="utf-8")
    layouts = {"one file": folder / "one.jsonl", few.name: few, many.name: many}
    for name in (few.name, many.name):
        layouts[f"zip of {name}"] = folder / f"{name}.zip"
        with zipfile.ZipFile(layouts[f"zip of {name}"], "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted((folder / name).iterdir()):
                archive.write(path, path.name)
    return layouts


def compare_layouts(folder: Path, count: int, workers: int, python: str | None) -> bool:
    """Measure all stages up to tokens on each layout; return whether small files take at most 1.5 times as long."""
    layouts = write_layouts(folder / "texts", count)
    script = write_script(folder / "files.py", DATATROVE_FILES)
    loop = write_script(folder / "loop.py", LOOP)
    totals: dict[str, float] = {}
    kept: dict[str, int] = {}
    for name, place in layouts.items():
        out = folder / f"out {name}"
        settings = [
            f"folder={out}",
            f"runner.workers={workers}",
            f"corpus.sources={place}",
            "corpus.documents=file",
            "corpus.split_by=document",
        ]
        runs = [run([sys.executable, "-m", "textmill", stage, "quickstart", *settings]) for stage in STAGES]
        totals[name] = sum(one.cpu for one in runs)
        kept[name] = json.loads((out / "corpus" / "manifest.json").read_text())["documents"]
        stages = ", ".join(f"{stage} {one.cpu:.1f}" for stage, one in zip(STAGES, runs, strict=True))
        seconds, peak = sum(one.seconds for one in runs), max(one.peak for one in runs)
        print(
            f"  {name:<20} {totals[name]:7.1f} s of CPU ({stages}), {seconds:.1f} s, peak {peak:,.0f} MB, "
            f"{kept[name]:,} kept: {totals[name] / totals['one file']:.2f} times one file",
            flush=True,
        )
        others = {} if place.suffix == ".zip" else {"a plain loop": [sys.executable, loop, str(place), f"{out}.loop"]}
        if (
            python
            and place.suffix != ".zip"
            and ".txt" not in {path.suffix for path in (place.iterdir() if place.is_dir() else [place])}
        ):
            texts = place if place.is_dir() else folder / "one"
            if not place.is_dir():
                texts.mkdir()
                (texts / place.name).symlink_to(place)
            others["datatrove"] = [python, script, str(texts), f"{out}.datatrove", str(workers)]
        for other, command in others.items():
            measured = run(command)
            print(f"    {other:<18} {measured.cpu:7.1f} s of CPU instead of prepare's {runs[0].cpu:.1f}", flush=True)
    assert len(set(kept.values())) == 1, kept
    return max(totals.values()) <= MAX_LAYOUT_RATIO * totals["one file"]


def write_script(path: Path, script: str) -> str:
    """Write a script to disk."""
    path.write_text(script)
    return str(path)


def main(megabytes: int = 55, workers: int = 2, python: str | None = None) -> int:
    """Run all comparisons; the results go to docs/benchmarks.md."""
    python = python or os.environ.get("DATATROVE_PYTHON")
    print(
        f"{date.today()}, {len(os.sched_getaffinity(0))} {platform.machine()} cores, "
        f"Python {platform.python_version()}",
        flush=True,
    )
    if python:
        names = "('datatrove', 'ftfy', 'spacy')"
        version = f"from importlib.metadata import version as v; print(*(f'{{name}} {{v(name)}}' for name in {names}))"
        print(run([python, "-c", version]).output.strip())
    else:
        print(
            "datatrove is missing, so only textmill is measured; give a Python that has it as the third argument "
            "or in DATATROVE_PYTHON"
        )
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        compare_cleaning(root, python)
        compare_loop(root, megabytes)
        total, _ = write_files(root / "texts", megabytes, 2 * workers)
        compare_near(root, root / "texts", total, workers, python)
        print("peak memory of prepare, shingles of 5 characters")
        return 0 if measure_memory(root, megabytes, workers) else 1


def main_files(count: int = 200_000, workers: int = 2, python: str | None = None) -> int:
    """Compare layouts of the same small documents; the results go to bench/LOG.md."""
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}, {count:,} documents", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        return 0 if compare_layouts(Path(folder), count, workers, python or os.environ.get("DATATROVE_PYTHON")) else 1


if __name__ == "__main__" and sys.argv[1:2] == ["files"]:
    number, more, *rest = [*sys.argv[2:], *("200000", "2")[len(sys.argv[2:]) :]]
    sys.exit(main_files(int(number), int(more), *rest))
if __name__ == "__main__":
    number, more, *rest = [*sys.argv[1:], *("55", "2")[len(sys.argv[1:]) :]]
    sys.exit(main(int(number), int(more), *rest))
