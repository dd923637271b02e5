"""Builds the batches of a config: its layout over the stores of a split.

`_build_layout` is where `train.layout` becomes a class; training calls `open_batches`, evaluation `valid_batches`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from textmill.config import TrainConfig
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import Batch
from textmill.tokens.batches.by_step import Batches, batches_in_order
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.features import FeaturesLayout
from textmill.tokens.batches.history import DataRange, blends_of, sizes_of
from textmill.tokens.batches.labelled import LabelledLayout
from textmill.tokens.batches.layout import Layout
from textmill.tokens.batches.masked import MaskedLayout, has_spans
from textmill.tokens.batches.masked_tokens import masked_tokens_of
from textmill.tokens.batches.packed import PackedLayout
from textmill.tokens.batches.padded import PaddedLayout
from textmill.tokens.batches.windows import window_batches
from textmill.tokens.splits import FeatureRows, Splits, WeightedStore
from textmill.tokens.token_tables import has_masked_rows
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


def open_batches(
    train: TrainConfig, splits: Splits, *, length: int, folder: Path | None, history: Sequence[DataRange] = ()
) -> Batches:
    """The batches of the train split, blended by weight; large indexes are cached in `folder`.

    `history` are the step ranges of a run whose batch or blend was changed, the last with today's settings.
    """
    stores = splits.by_split["train"]
    layouts = [_build_layout(train, weighted, splits.tokenizer, length, train.seed, folder) for weighted in stores]
    ranges = history or [DataRange(0, train.batch, train.batch_rampup, splits.sources)]
    sizes = sizes_of(ranges)
    return Batches(
        layouts,
        [weighted.weight for weighted in stores],
        sizes,
        [weighted.store for weighted in stores],
        blends_of(ranges, sizes) if splits.sources else (),
    )


def valid_batches(train: TrainConfig, splits: Splits, *, length: int, folder: Path | None = None) -> Iterator[Batch]:
    """The valid split in the layout of training: with loss on every token once, or masked in the same way each time."""
    stores = splits.nonempty("valid")
    tokenizer = splits.tokenizer
    if train.layout == "packed" and not train.packed.isolate_documents:
        for weighted in stores:
            yield from window_batches(
                weighted.store,
                length=length,
                stride=length,
                batch=train.batch,
                first_input=tokenizer.end,
                vocab=tokenizer.vocab,
            )
    else:
        all_kept = train.model_copy(update={"packed": train.packed.model_copy(update={"last_window": "keep"})})
        used = [weighted for weighted in stores if _has_samples(train, weighted)]
        layouts = [_build_layout(all_kept, weighted, tokenizer, length, None, folder) for weighted in used]
        yield from batches_in_order(layouts, train.batch, [weighted.store for weighted in stores])


def _has_samples(train: TrainConfig, weighted: WeightedStore) -> bool:
    """Whether the layout gets at least one sample from this store."""
    if train.layout == "features" or weighted.features is not None:
        return weighted.features is None or bool(weighted.features.table.count)
    if train.layout == "labelled":
        return bool(len(weighted.store))
    if train.layout == "masked":
        return has_spans(weighted.store, train.masked)
    return (
        weighted.store.tokens > 1 if train.layout == "packed" else bool((weighted.store.document_lengths() > 1).any())
    )


def _build_layout(
    train: TrainConfig,
    weighted: WeightedStore,
    tokenizer: TextTokenizer,
    length: int,
    seed: int | None,
    folder: Path | None,
) -> Layout:
    """`train.layout` over a store; Parquet files of masked examples need FeaturesLayout too."""
    store = weighted.store
    vocab = tokenizer.vocab
    if train.layout == "features" or weighted.features is not None:
        return FeaturesLayout(
            _check_features(train, weighted),
            store,
            length=length,
            seed=seed,
            vocab=vocab,
            folder=folder,
            pairs=train.masked.pairs != "none",
        )
    if train.layout == "packed":
        return PackedLayout(
            store,
            length=length,
            seed=seed,
            isolate_documents=train.packed.isolate_documents,
            last_window=train.packed.last_window,
            vocab=vocab,
            folder=folder,
        )
    if train.layout == "masked":
        return MaskedLayout(
            store,
            length=length,
            seed=seed,
            tokens=masked_tokens_of(tokenizer, train.masked),
            settings=train.masked,
            folder=folder,
        )
    pad = tokenizer.end if tokenizer.pad is None else tokenizer.pad
    if train.layout == "labelled":
        return LabelledLayout(store, length=length, seed=seed, pad=pad, separator=tokenizer.separator, vocab=vocab)
    if train.layout == "chat":
        return ChatLayout(
            store,
            length=length,
            seed=seed,
            pad=pad,
            truncate=train.chat.truncate,
            pack=train.chat.pack,
            vocab=vocab,
            folder=folder,
        )
    return PaddedLayout(
        store,
        length=length,
        seed=seed,
        pad=pad,
        long_documents=train.padded.long_documents,
        end_token=tokenizer.end if train.padded.end_truncated else None,
        vocab=vocab,
        folder=folder,
    )


def _check_features(train: TrainConfig, weighted: WeightedStore) -> FeatureRows:
    """The rows of a store; an error if it has none, or masked examples that another layout reads."""
    features = weighted.features
    if features is None:
        raise TextmillError(
            f"{weighted.store.prefix.parent}: has no feature rows, which train.layout=features needs; make them with "
            f"tokens.kind=features, name Parquet files that have them in tokens.use, or set train.layout=packed"
        )
    if train.layout == "features" and features.table.count and has_masked_rows(features.table):
        raise TextmillError(f"{features.table.files[0].parent}: has masked examples; set train.layout=masked")
    return features
