"""The batches that a config asks for: its layout over the stores of a split."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from textmill.config import TrainConfig
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.batch_sizes import Sizes
from textmill.tokens.batches.by_step import Batches, in_order
from textmill.tokens.batches.chat import Chat
from textmill.tokens.batches.features import FeatureRows
from textmill.tokens.batches.layout import Layout
from textmill.tokens.batches.packed import Packed
from textmill.tokens.batches.padded import Padded
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.splits import Share, Splits
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


def open_batches(train: TrainConfig, splits: Splits, *, length: int, folder: Path | None) -> Batches:
    """The train split's batches, blended by weight; large indexes stand in `folder`."""
    shares = splits.stores["train"]
    layouts = [_layout(train, share, splits.tokenizer, length, train.seed, folder) for share in shares]
    return Batches(layouts, [share.weight for share in shares], Sizes(train.batch, train.batch_rampup))


def valid_batches(train: TrainConfig, splits: Splits, *, length: int, folder: Path | None = None) -> Iterator[Batch]:
    """The valid split in its own order, every token asked once, laid out as it is trained on."""
    shares, tokenizer = splits.shares("valid"), splits.tokenizer
    if train.layout == "packed" and not train.packed.isolate_documents:
        for share in shares:
            yield from window_batches(
                share.store, length=length, stride=length, batch=train.batch, first=tokenizer.end, vocab=tokenizer.vocab
            )  # fmt: skip
    else:
        kept = train.model_copy(update={"packed": train.packed.model_copy(update={"last_window": "keep"})})
        layouts = [_layout(kept, share, tokenizer, length, None, folder) for share in shares if _asks(train, share)]
        yield from in_order(layouts, train.batch)


def _asks(train: TrainConfig, share: Share) -> bool:
    """Whether a store holds anything that its layout would ask."""
    if train.layout == "features":
        return share.features is None or bool(share.features.table.count)
    return share.store.tokens > 1 if train.layout == "packed" else bool((share.store.sizes() > 1).any())


def _layout(
    train: TrainConfig, share: Share, tokenizer: TextTokenizer, length: int, seed: int | None, folder: Path | None
) -> Layout:
    store, vocab = share.store, tokenizer.vocab
    if train.layout == "features":
        if share.features is None:
            raise TextmillError(
                f"{store.prefix.parent}: holds no rows, and train.layout=features trains on rows; make them with tokens.kind=features, "
                f"name Parquet files that have them in tokens.use, or set train.layout=packed"
            )
        return FeatureRows(share.features, store, length=length, seed=seed, vocab=vocab, folder=folder)
    if train.layout == "packed":
        return Packed(
            store,
            length=length,
            seed=seed,
            apart=train.packed.isolate_documents,
            tail=train.packed.last_window,
            vocab=vocab,
            folder=folder,
        )
    pad, close = (
        tokenizer.end if tokenizer.pad is None else tokenizer.pad,
        tokenizer.end if train.padded.end_truncated else None,
    )
    if train.layout == "chat":
        return Chat(
            store,
            length=length,
            seed=seed,
            pad=pad,
            cut=train.chat.truncate,
            pack=train.chat.pack,
            vocab=vocab,
            folder=folder,
        )
    return Padded(
        store,
        length=length,
        seed=seed,
        pad=pad,
        long=train.padded.long_documents,
        close=close,
        vocab=vocab,
        folder=folder,
    )
