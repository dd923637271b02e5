"""The batches that a config asks for: its layout over the stores of a split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from textmill.config import TrainConfig
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.batches import Batches, in_order
from textmill.tokens.batches.layout import Layout
from textmill.tokens.batches.packed import Packed
from textmill.tokens.batches.padded import Padded
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.splits import Splits
from textmill.tokens.store import TokenStore
from textmill.tokens.tokenizer import TextTokenizer


def open_batches(train: TrainConfig, splits: Splits, *, length: int, folder: Path | None) -> Batches:
    """The train split's batches, blended by weight; large indexes stand in `folder`."""
    shares = splits.stores["train"]
    layouts = [_layout(train, share.store, splits.tokenizer, length, train.seed, folder) for share in shares]
    return Batches(layouts, [share.weight for share in shares], train.batch)


def valid_batches(train: TrainConfig, splits: Splits, *, length: int) -> Iterator[Batch]:
    """The valid split in its own order, every token asked once, laid out as it is trained on."""
    stores, end = splits.of("valid"), splits.tokenizer.end
    if train.layout == "packed" and not train.apart:
        for store in stores:
            yield from window_batches(store, length=length, stride=length, batch=train.batch, first=end)
    else:
        yield from in_order([_layout(train, store, splits.tokenizer, length, None, None) for store in stores], train.batch)


def _layout(train: TrainConfig, store: TokenStore, tokenizer: TextTokenizer, length: int, seed: int | None, folder: Path | None) -> Layout:
    if train.layout == "packed":
        return Packed(store, length=length, seed=seed, apart=train.apart, tail=train.tail, vocab=tokenizer.vocab, folder=folder)
    close = tokenizer.end if train.close else None
    return Padded(
        store, length=length, seed=seed, pad=tokenizer.end, long=train.long, close=close, vocab=tokenizer.vocab, folder=folder
    )  # fmt: skip
