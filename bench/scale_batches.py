"""Opens a token store and builds batches: python -m bench.scale_batches PREFIX INDEX-FOLDER STEPS (bench/scale.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from textmill.tokens.batches.blend import DataRange
from textmill.tokens.batches.loader import Batches
from textmill.tokens.batches.packed import PackedLayout
from textmill.tokens.store import open_store

LENGTH, BATCH, SEED = 256, 32, 1234


def main() -> None:
    """Build the index of the first epoch, or map it, and then batches spread over the epoch."""
    prefix, folder, steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    packed = PackedLayout(open_store(prefix), length=LENGTH, seed=SEED, folder=folder)
    packed.document_ends(0)
    batches = Batches([packed], [DataRange(0, BATCH, (), [("", 1.0)])])
    epoch = max(1, packed.samples_per_epoch // BATCH - 1)
    for step in range(steps):
        batches.batch_at(step * 7919 % epoch)


if __name__ == "__main__":
    main()
