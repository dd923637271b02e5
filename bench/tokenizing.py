"""Measures textmill tokenize (read, encode, write) against encode_batch and one tokenizer per process of tokenizers.

    python bench/tokenizing.py [MB for the other two]

All three encode the English text in ../shared/data with GPT-2's vocabulary on all cores, and write the ids with an
end-of-text token after each document. The written bytes must be the same. The other two read JSON lines; tokenize reads
the prepared corpus, and the time of prepare is printed too. The other two may get a part of the text only, because
their throughput does not depend on its size.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
VOCABULARY = SHARED / "gpt2_bpe"
CHUNK = 25
"""Lines that Megatron's script passes to a worker at a time."""


def read_lines(path: Path, limit: float) -> Iterator[bytes]:
    """Lines up to about `limit` bytes."""
    size = 0
    with open(path, "rb") as stream:
        for line in stream:
            if size >= limit:
                return
            size += len(line)
            yield line


def open_reference() -> Any:
    """GPT-2's tokenizer in the tokenizers library."""
    from tokenizers import ByteLevelBPETokenizer

    return ByteLevelBPETokenizer(str(VOCABULARY / "encoder.json"), str(VOCABULARY / "vocab.bpe"))._tokenizer


def start_worker() -> None:
    """Give each process its own tokenizer with one thread."""
    global tokenizer, end
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = open_reference()
    end = tokenizer.token_to_id("<|endoftext|>")


def encode_line(line: bytes) -> tuple[list[int], int]:
    """Encode a line as a worker of Megatron's script does."""
    text = json.loads(line)["text"]
    return [*tokenizer.encode(text, add_special_tokens=False).ids, end], len(text.encode())


def one_per_process(source: Path, target: Path, limit: float) -> int:
    """Encode in a pool of processes and write in the parent, in order; return the bytes of text."""
    done = 0
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), start_worker) as pool, open(target, "wb") as stream:
        for ids, size in pool.imap(encode_line, read_lines(source, limit), CHUNK):
            stream.write(np.array(ids, np.uint16).tobytes())
            done += size
    return done


def encode_batch(source: Path, target: Path, limit: float) -> int:
    """Encode in one process with the library's own threads; return the bytes of text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    inner, done, lines = open_reference(), 0, read_lines(source, limit)
    stop = inner.token_to_id("<|endoftext|>")
    with open(target, "wb") as stream:
        while texts := [json.loads(line)["text"] for line in islice(lines, 1000)]:
            for encoding in inner.encode_batch(texts, add_special_tokens=False):
                stream.write(np.array([*encoding.ids, stop], np.uint16).tobytes())
            done += sum(len(text.encode()) for text in texts)
    return done


def textmill(command: str, source: Path, folder: Path) -> int:
    """Run a command on a corpus that keeps every document, in order, in one split; return the bytes of text."""
    settings = [
        f"folder={folder}",
        f"corpus.sources={source}",
        "corpus.dedup=none",
        "corpus.rules=[]",
        "corpus.split=100",
    ]
    arguments = [sys.executable, "-m", "textmill", command, "quickstart", *settings, f"tokenizer.use={VOCABULARY}"]
    subprocess.run(arguments, check=True, capture_output=True)
    size: int = json.loads((folder / "corpus" / "account.json").read_text())["by_split"]["train"]["bytes"]
    return size


def measure(name: str, work: Callable[[], int]) -> float:
    """Run `work` in its own process, print its throughput and peak memory; return bytes per second."""
    reader, writer = multiprocessing.Pipe(duplex=False)

    def inner() -> None:
        start = time.monotonic()
        size = work()
        clock = time.monotonic() - start
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        writer.send(
            (size, clock, sum(one.ru_utime + one.ru_stime for one in used), max(one.ru_maxrss for one in used) / 1024)
        )

    process = multiprocessing.get_context("fork").Process(target=inner)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{name}: failed")
    size, clock, processor, memory = reader.recv()
    rates = f"{size / clock / 1e6:7.1f} MB/s, {size / processor / 1e6:6.1f} MB/s per core"
    print(f"{name:<36}{size / 1e6:6.0f} MB in {clock:6.1f} s: {rates}, peak {memory:5.0f} MB per process", flush=True)
    return float(size / clock)


def same_bytes(one: Path, other: Path) -> bool:
    """Whether the shorter file is a prefix of the longer one."""
    size = min(one.stat().st_size, other.stat().st_size)
    digests = []
    for path in (one, other):
        with open(path, "rb") as stream:
            digests.append(hashlib.sha256(stream.read(size)).digest())
    return size > 0 and digests[0] == digests[1]


def main(limit: float = float("inf")) -> int:
    """Print the table; its numbers go to docs/benchmarks.md."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        source, quarter, ours = here / "en.jsonl", here / "quarter.jsonl", here / "ours" / "tokens" / "train.bin"
        with lzma.open(SHARED / "en.jsonl.xz") as packed, open(source, "wb") as stream:
            while block := packed.read(1 << 24):
                stream.write(block)
        quarter.write_bytes(b"".join(read_lines(source, source.stat().st_size / 4)))
        for command in ("prepare", "fit-tokenizer", "tokenize"):
            for text, name in ((quarter, "quarter"), (source, "ours")):
                rate = measure(f"textmill {command}", partial(textmill, command, text, here / name))
        equal, times = [], []
        for other in (one_per_process, encode_batch):
            times.append(
                rate / measure(f"tokenizers, {other.__name__}", partial(other, source, here / "other.bin", limit))
            )
            equal.append(same_bytes(ours, here / "other.bin"))
        print(
            f"tokenize is {times[0]:.1f} times as fast as one tokenizer per process, "
            f"{times[1]:.1f} times as fast as encode_batch; "
            f"the same bytes: {equal}"
        )
        return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main(*(float(argument) * 1e6 for argument in sys.argv[1:])))
