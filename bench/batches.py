"""Measures batch building and the cost of its index: 100 million documents, and a store larger than memory.

    python bench/batches.py [documents in millions] [folder]

Prints the time and memory of an epoch's index, the time to memory-map it from a second process, and the tokens/s of
`batch_at` at the first, a middle and the last steps, next to a plain loop of numpy slices over the same windows.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from textmill.tokens.batches.blend import DataRange
from textmill.tokens.batches.loader import Batches
from textmill.tokens.batches.packed import PackedLayout
from textmill.tokens.store import TokenStore, index_blocks, open_store

LENGTH, BATCH, SEED = 1024, 64, 1234


def main() -> None:
    """Write a sparse store, then measure it in two processes."""
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    if len(sys.argv) > 3:
        return measure(Path(sys.argv[2]))
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        prefix = Path(folder) / "many"
        tokens = make_store(prefix, int(millions * 1e6))
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        size = 2 * tokens
        print(
            f"{millions:g} million documents, {tokens / 1e9:.2f} billion tokens, {size / 1e9:.1f} GB of ids, "
            f"{memory / 1e9:.1f} GB of memory"
        )
        for title in ("built", "mapped"):
            print(f"-- index {title}, in a new process", flush=True)
            subprocess.run([sys.executable, __file__, str(millions), str(prefix), "measure"], check=True)


def make_store(prefix: Path, documents: int) -> int:
    """Write a store with a real index and a sparse file of ids: documents of 100 to 1,500 tokens."""
    lengths = np.random.default_rng(1).integers(100, 1500, documents, dtype=np.int32)
    with open(f"{prefix}.idx", "wb") as stream:
        stream.writelines(index_blocks("mmap", np.dtype(np.uint16), lengths, np.arange(1, documents + 1)))
    tokens = int(lengths.sum(dtype=np.int64))
    with open(f"{prefix}.bin", "wb") as stream:
        stream.truncate(2 * tokens)
    return tokens


def measure(prefix: Path) -> None:
    """Open the store, build or map the index, and build batches, in one process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = time.perf_counter()
    store = open_store(prefix)
    packed = PackedLayout(store, length=LENGTH, seed=SEED, folder=prefix.parent / "index")
    packed.document_ends(0)
    seconds = time.perf_counter() - clock
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"   {seconds:.2f} s, peak memory {peak / 1e6:.2f} GB ({before / 1e6:.2f} GB before)")
    batches = Batches([packed], [DataRange(0, BATCH, (), [("", 1.0)])])
    steps = packed.samples_per_epoch // BATCH
    for name, first in (("first", 0), ("middle", steps // 2), ("last", steps - 60)):
        cold, warm = (rate(batches.batch_at, first) / 1e6 for _ in range(2))
        print(
            f"   batch_at from the {name} step, {first:,}: {warm:.1f} million tokens/s "
            f"({cold:.1f} if the pages are not cached)"
        )
    plain = rate(lambda step: slices(store, step), 0)
    print(f"   plain numpy slices, unshuffled: {plain / 1e6:.1f} million tokens/s")


def rate(batch_at: object, first: int, count: int = 50) -> float:
    """Tokens per second over some steps, after one warm-up step."""
    batch_at(first)  # type: ignore[operator]
    clock = time.perf_counter()
    for step in range(first + 1, first + 1 + count):
        batch_at(step)  # type: ignore[operator]
    return count * BATCH * LENGTH / (time.perf_counter() - clock)


def slices(store: TokenStore, step: int) -> np.ndarray:  # type: ignore[type-arg]
    """A loader without documents and shuffling: one slice per window."""
    starts = [(step * BATCH + row) * LENGTH for row in range(BATCH)]
    return np.stack([store.ids[start : start + LENGTH + 1].astype(np.int32) for start in starts])


if __name__ == "__main__":
    main()
