"""End-to-end tokenize (read, encode, write) against tokenizers' encode_batch and against one tokenizer a process.

    python bench/tokenizing.py [MB for the peers]

All three take the English text beside the repository with GPT-2's vocabulary, on all cores of this machine, and write the ids with an
end-of-text token after each document; the bytes written must be the same. The peers read JSON lines, tokenize reads the prepared
corpus; what prepare took is said. The peers may be given a part of the text: their rate does not depend on how much there is.
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
"""Lines that Megatron's script hands to a worker at a time."""


def lines_of(path: Path, limit: float) -> Iterator[bytes]:
    """Lines until so many bytes of them were given."""
    given = 0
    with open(path, "rb") as stream:
        for line in stream:
            if given >= limit:
                return
            given += len(line)
            yield line


def open_reference() -> Any:
    """GPT-2's tokenizer, as tokenizers has it."""
    from tokenizers import ByteLevelBPETokenizer

    return ByteLevelBPETokenizer(str(VOCABULARY / "encoder.json"), str(VOCABULARY / "vocab.bpe"))._tokenizer


def start_worker() -> None:
    """Each process has its own tokenizer, on one thread."""
    global tokenizer, end
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = open_reference()
    end = tokenizer.token_to_id("<|endoftext|>")


def encode_line(line: bytes) -> tuple[list[int], int]:
    """What a worker of Megatron's script does with a line."""
    text = json.loads(line)["text"]
    return [*tokenizer.encode(text, add_special_tokens=False).ids, end], len(text.encode())


def one_a_process(source: Path, target: Path, limit: float) -> int:
    """A pool of processes, lines in and ids out in order, written by the parent; bytes of text."""
    done = 0
    with multiprocessing.Pool(len(os.sched_getaffinity(0)), start_worker) as pool, open(target, "wb") as stream:
        for ids, size in pool.imap(encode_line, lines_of(source, limit), CHUNK):
            stream.write(np.array(ids, np.uint16).tobytes())
            done += size
    return done


def encode_batch(source: Path, target: Path, limit: float) -> int:
    """One process, the library's own threads; bytes of text."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    inner, done, lines = open_reference(), 0, lines_of(source, limit)
    stop = inner.token_to_id("<|endoftext|>")
    with open(target, "wb") as stream:
        while texts := [json.loads(line)["text"] for line in islice(lines, 1000)]:
            for encoding in inner.encode_batch(texts, add_special_tokens=False):
                stream.write(np.array([*encoding.ids, stop], np.uint16).tobytes())
            done += sum(len(text.encode()) for text in texts)
    return done


def textmill(command: str, source: Path, folder: Path) -> int:
    """Call a command on a corpus that keeps every document, in order, on one side; bytes of text."""
    settings = [
        f"folder={folder}",
        f"corpus.sources={source}",
        "corpus.dedup=none",
        "corpus.rules=[]",
        "corpus.split=100",
    ]
    words = [sys.executable, "-m", "textmill", command, "quickstart", *settings, f"tokenizer.use={VOCABULARY}"]
    subprocess.run(words, check=True, capture_output=True)
    size: int = json.loads((folder / "corpus" / "account.json").read_text())["by_split"]["train"]["bytes"]
    return size


def measure(name: str, work: Callable[[], int]) -> float:
    """Do work in a process of its own, print its rates and the most memory that one process took; bytes a second."""
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
    rates = f"{size / clock / 1e6:7.1f} MB/s, {size / processor / 1e6:6.1f} MB a second of one core"
    print(
        f"{name:<36}{size / 1e6:6.0f} MB in {clock:6.1f} s: {rates}, at most {memory:5.0f} MB in a process", flush=True
    )
    return float(size / clock)


def same_bytes(one: Path, other: Path) -> bool:
    """Whether the shorter file is the beginning of the longer."""
    size = min(one.stat().st_size, other.stat().st_size)
    digests = []
    for path in (one, other):
        with open(path, "rb") as stream:
            digests.append(hashlib.sha256(stream.read(size)).digest())
    return size > 0 and digests[0] == digests[1]


def main(limit: float = float("inf")) -> int:
    """The table; its figures go to docs/benchmarks.md."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        source, quarter, ours = here / "en.jsonl", here / "quarter.jsonl", here / "ours" / "tokens" / "train.bin"
        with lzma.open(SHARED / "en.jsonl.xz") as packed, open(source, "wb") as stream:
            while block := packed.read(1 << 24):
                stream.write(block)
        quarter.write_bytes(b"".join(lines_of(source, source.stat().st_size / 4)))
        for command in ("prepare", "fit-tokenizer", "tokenize"):
            for text, name in ((quarter, "quarter"), (source, "ours")):
                rate = measure(f"textmill {command}", partial(textmill, command, text, here / name))
        equal, times = [], []
        for peer in (one_a_process, encode_batch):
            times.append(
                rate / measure(f"tokenizers, {peer.__name__}", partial(peer, source, here / "peer.bin", limit))
            )
            equal.append(same_bytes(ours, here / "peer.bin"))
        print(
            f"tokenize is {times[0]:.1f} times one tokenizer a process, {times[1]:.1f} times encode_batch; the same bytes: {equal}"
        )
        return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main(*(float(word) * 1e6 for word in sys.argv[1:])))
