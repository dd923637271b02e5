"""Measures batches of the masked layout, next to transformers' collator, which only masks ready-made rows.

    python bench/masked_batches.py [tokens in millions]

Prints how long a store of sentences takes to open, how much padding is left, and the time of a batch on one core.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

from textmill.config import MaskedConfig, TokenizerConfig
from textmill.corpus.find_sources import bundled_corpora
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.masked import MaskedLayout
from textmill.tokens.batches.masking import masked_tokens_of
from textmill.tokens.store import StoreWriter, TokenStore, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

SHAPES = ((256, 128), (64, 512))
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"pairs": "order"}, {"pairs": "none"}, {"packs": False})
BATCHES = 20


def main() -> None:
    """Fit a vocabulary on the shipped texts, write a store of random sentences, and measure."""
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 100
    texts = [path.read_text(encoding="utf-8") for path in sorted(bundled_corpora().values()) if path.suffix == ".txt"]
    tokenizer = fit(iter([texts]), TokenizerConfig(kind="wordpiece", vocab=8000))
    with tempfile.TemporaryDirectory() as folder:
        store = write_store(Path(folder) / "many", round(millions * 1e6), tokenizer.vocab)
        print(f"{store.tokens / 1e6:.0f} million tokens, {len(store.lengths):,} sentences, {len(store):,} documents")
        for rows, length in SHAPES:
            for settings in SETTINGS:
                measure(store, tokenizer, rows, length, settings)
            measure_collator(tokenizer, rows, length)


def write_store(prefix: Path, tokens: int, vocab: int) -> TokenStore:
    """Documents of 1 to 60 sentences of 4 to 44 tokens."""
    dice, left = np.random.default_rng(1), tokens
    with StoreWriter(prefix, np.dtype(np.uint16)) as writer:
        while left > 0:
            documents = dice.integers(1, 61, max(1, min(5000, left // 700)))
            lengths = dice.integers(4, 45, documents.sum())
            writer.add_flat(dice.integers(5, vocab, lengths.sum()), lengths, documents)
            left -= int(lengths.sum())
    return open_store(prefix)


def measure(store: TokenStore, tokenizer: TextTokenizer, rows: int, length: int, settings: dict[str, Any]) -> None:
    """Print the CPU time of opening and of a batch."""
    config = MaskedConfig(pairs=settings.get("pairs", "next"))
    tokens, clock = masked_tokens_of(tokenizer, config), time.process_time()
    layout = MaskedLayout(
        store, length=length, seed=1, tokens=tokens, settings=config, packs=settings.get("packs", True)
    )
    opened, clock = time.process_time() - clock, time.process_time()
    padding = chosen = filled = 0
    for step in range(BATCHES):
        batch = layout.build_samples(np.arange(step * rows, (step + 1) * rows))
        assert batch.documents is not None
        padding += int((batch.documents == 0).sum())
        filled += int((batch.documents > 0).sum())
        chosen += int((batch.labels != IGNORED).sum())
    seconds = (time.process_time() - clock) / BATCHES
    print(
        f"  {rows} x {length} {settings or 'defaults'}: open {opened:.1f} s, batch {1e3 * seconds:.1f} ms, "
        f"{rows / seconds:,.0f} samples/s, padding {padding / (padding + filled):.1%}, predicted {chosen / filled:.2%}"
    )


def measure_collator(tokenizer: TextTokenizer, rows: int, length: int) -> None:
    """Print the CPU time of transformers' masking of single tokens in rows that are full already."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer.inner, **dict(tokenizer.roles))
    collate = DataCollatorForLanguageModeling(fast, mlm_probability=0.15, return_tensors="np")
    ids = np.random.default_rng(2).integers(5, tokenizer.vocab, (rows, length))
    examples = [{"input_ids": row.tolist()} for row in ids]
    clock = time.process_time()
    for _ in range(BATCHES):
        collate(examples)
    seconds = (time.process_time() - clock) / BATCHES
    print(
        f"  {rows} x {length} transformers' collator, ready rows: {1e3 * seconds:.1f} ms, "
        f"{rows / seconds:,.0f} samples/s"
    )


if __name__ == "__main__":
    main()
