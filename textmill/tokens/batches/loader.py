"""batch_at(step): the samples of a step, from one store or a blend of several, as a pure function of the step.

Step 10 with a batch of 8 has the samples 80 to 87 of the run (`BatchSizes`). The blend says which store each sample
comes from and its number there (`Blend`); the store's layout builds it (packed.py and the other layouts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import TrainConfig
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED, Batch, Layout, Numbers
from textmill.tokens.batches.blend import DataRange, blends_of, sizes_of
from textmill.tokens.batches.chat import ChatLayout
from textmill.tokens.batches.features import FeaturesLayout
from textmill.tokens.batches.labelled import LabelledLayout
from textmill.tokens.batches.masked import MaskedLayout, has_spans
from textmill.tokens.batches.masking import masked_tokens_of
from textmill.tokens.batches.packed import PackedLayout, window_batches
from textmill.tokens.batches.padded import PaddedLayout
from textmill.tokens.existing_tokens import has_masked_rows
from textmill.tokens.splits import FeatureRows, Splits, WeightedStore
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
    return Batches(layouts, ranges, [weighted.name for weighted in stores])


class Batches:
    """The batches of a run: one layout per store of the last of `ranges`, which have batch sizes and weights.

    `names`: of the parts of the corpus that the layouts read, if they have names.
    """

    def __init__(self, layouts: Sequence[Layout], ranges: Sequence[DataRange], names: Sequence[str] = ()) -> None:
        self.layouts = layouts
        self.names = names
        self.sizes = sizes_of(ranges)
        self.blends = blends_of(ranges, self.sizes)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all stores together."""
        return sum(layout.samples_per_epoch for layout in self.layouts)

    def batch_at(self, step: int, part: slice = slice(None)) -> Batch:
        """The global batch of a step, or only the samples of it that `part` selects."""
        samples = self._sample_numbers(step)[part]
        for layout in self.layouts:
            layout.store.check_mapped()
        stores, numbers = self._locate(samples)
        if len(np.unique(stores)) <= 1:
            store = int(stores[0]) if len(stores) else 0
            return replace(self.layouts[store].build_samples(numbers), samples=samples)
        parts = [(rows, self.layouts[store].build_samples(numbers[rows])) for store, rows in _rows_by_store(stores)]
        return replace(_merge(parts), samples=samples)

    def documents_at(self, step: int) -> Iterator[tuple[int, int, int]]:
        """(sample, store, document) for every document in the batch of a step."""
        samples = self._sample_numbers(step)
        stores, numbers = self._locate(samples)
        for store, rows in _rows_by_store(stores):
            found_rows, documents = self.layouts[store].find_documents(numbers[rows])
            for row, document in zip(found_rows.tolist(), documents.tolist(), strict=True):
                yield int(samples[rows[row]]), store, document

    def describe_mixture(self, samples: int) -> str | None:
        """The share of each named part in the first `samples` samples, and how often it is repeated."""
        if not any(self.names):
            return None
        counts = self.samples_by_layout(samples)
        parts = (
            f"{name} {count / max(1, samples):.1%} of the samples, {count / layout.samples_per_epoch:.2f} epochs"
            for name, layout, count in zip(self.names, self.layouts, counts, strict=True)
        )
        return f"mixture: {'; '.join(parts)}"

    def samples_by_layout(self, samples: int) -> list[int]:
        """How many of the first `samples` samples of the run each layout gives."""
        counts = [0] * len(self.layouts)
        ends = [*(blend_range.sample for blend_range in self.blends[1:]), samples]
        for blend_range, end in zip(self.blends, ends, strict=True):
            found = blend_range.blend.counts_before(max(0, min(end, samples) - blend_range.sample))
            for layout, count in zip(blend_range.layouts, found.tolist(), strict=True):
                if layout is not None:
                    counts[layout] += count
        return counts

    def _locate(self, samples: Numbers) -> tuple[Numbers, Numbers]:
        """(layout, number of the sample within its store) for each sample of the run."""
        layouts = np.zeros_like(samples)
        numbers = np.zeros_like(samples)
        range_starts = [blend_range.sample for blend_range in self.blends]
        ranges = np.searchsorted(range_starts, samples, side="right") - 1
        for index in np.unique(ranges).tolist():
            rows = ranges == index
            blend_range = self.blends[index]
            stores, numbers_in_range = blend_range.blend.locate(samples[rows] - blend_range.sample)
            if any(blend_range.layouts[store] is None for store in np.unique(stores).tolist()):
                raise TextmillError(
                    "the step saw a token store that tokens.use no longer names; add it again to see it"
                )
            layout_by_store = np.array([-1 if layout is None else layout for layout in blend_range.layouts])
            taken_by_store = np.array(blend_range.taken, np.int64)
            layouts[rows] = layout_by_store[stores]
            numbers[rows] = numbers_in_range + taken_by_store[stores]
        return layouts, numbers

    def _sample_numbers(self, step: int) -> Numbers:
        return np.arange(self.sizes.samples_before(step), self.sizes.samples_before(step + 1), dtype=np.int64)


def _merge(parts: list[tuple[Numbers, Batch]]) -> Batch:
    """Put the samples of all stores back into the order of the batch; a part has its rows there and its samples."""
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    batches = [batch for _, batch in parts]
    if any(batch.pair_labels is not None for batch in batches):  # a store without pairs has no labels of pairs
        batches = [
            replace(batch, pair_labels=np.full_like(batch.labels, IGNORED)) if batch.pair_labels is None else batch
            for batch in batches
        ]
    merged: dict[str, Any] = {}
    for name in ("inputs", "labels", "samples", "documents", "types", "pair_labels"):
        arrays = [getattr(batch, name) for batch in batches]
        if arrays[0] is not None:
            merged[name] = np.concatenate(arrays)[order]
    return Batch(**merged)


def _rows_by_store(stores: Numbers) -> Iterator[tuple[int, Numbers]]:
    for store in np.unique(stores).tolist():
        yield store, np.flatnonzero(stores == store)


def valid_batches(train: TrainConfig, splits: Splits, *, length: int, folder: Path | None = None) -> Iterator[Batch]:
    """The valid split in the layout of training: with loss on every token once, or masked in the same way each time."""
    stores = splits.nonempty("valid")
    tokenizer = splits.tokenizer
    batch = train.evaluate_batch or train.batch
    if train.layout == "packed" and not train.packed.isolate_documents:
        for weighted in stores:
            yield from window_batches(
                weighted.store,
                length=length,
                stride=length,
                batch=batch,
                first_input=tokenizer.eos_id,
                vocab=tokenizer.vocab,
            )
    else:
        used = [weighted for weighted in stores if _has_samples(train, weighted)]
        layouts = [_build_layout(train, weighted, tokenizer, length, None, folder) for weighted in used]
        yield from batches_in_order(layouts, batch)


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


def batches_in_order(layouts: Sequence[Layout], batch: int) -> Iterator[Batch]:
    """Every sample of every layout once, one layout after the other."""
    before = 0
    for layout in layouts:
        for start in range(0, layout.samples_per_epoch, batch):
            layout.store.check_mapped()
            numbers = np.arange(start, min(start + batch, layout.samples_per_epoch), dtype=np.int64)
            yield replace(layout.build_samples(numbers), samples=before + numbers)
        before += layout.samples_per_epoch


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
    pad_id = tokenizer.padding_id
    if train.layout == "labelled":
        return LabelledLayout(store, length=length, seed=seed, pad_id=pad_id, sep_id=tokenizer.sep_id, vocab=vocab)
    if train.layout == "chat":
        return ChatLayout(
            store, length=length, seed=seed, pad_id=pad_id, pack=train.chat.pack, vocab=vocab, folder=folder
        )
    return PaddedLayout(
        store,
        length=length,
        seed=seed,
        pad_id=pad_id,
        long_documents=train.padded.long_documents,
        eos_id=tokenizer.eos_id,
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
