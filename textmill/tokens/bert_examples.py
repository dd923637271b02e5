"""BERT's pretraining examples in TFRecord files: masked sentence pairs of one length, as Google's BERT writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from textmill.config import MaskedConfig, TrainConfig
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.masked import MaskedLayout, has_spans
from textmill.tokens.batches.masking import masked_tokens_of
from textmill.tokens.protobuf import BrokenMessage
from textmill.tokens.store import open_store
from textmill.tokens.tfrecord import (
    FLOATS,
    INTEGERS,
    KIND_NAMES,
    Feature,
    build_examples,
    count_records,
    decode_varints,
    read_records,
    split_example,
    write_records,
)
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

AGAIN = "make the file again, or remove it from tokens.use"
KINDS = {
    "input_ids": INTEGERS,
    "input_mask": INTEGERS,
    "segment_ids": INTEGERS,
    "masked_lm_positions": INTEGERS,
    "masked_lm_ids": INTEGERS,
    "masked_lm_weights": FLOATS,
    "next_sentence_labels": INTEGERS,
}
"""The features of an example."""
SCHEMA = pa.schema(
    [
        (name, pa.list_(pa.int64()))
        for name in ("input_ids", "attention_mask", "token_type_ids", "labels", "next_sentence_label")
    ]
)
"""The columns that examples are read as, with transformers' names; labels are -100 where nothing is predicted."""
ROWS = 1024
"""Examples read or written at a time."""
FILE_TOKENS = 1 << 23
"""About how many tokens go into one file."""
EXAMPLE_SPANS = "tfrecord-index"
"""The subfolder of the tokens folder with the spans of the samples, while files are written."""


@dataclass(frozen=True)
class ExampleRows:
    """The examples of a file as a table, with the attributes of an Arrow stream."""

    path: Path
    schema: pa.Schema = field(default=SCHEMA, init=False)

    def __len__(self) -> int:
        return count_records(self.path)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        return read_examples(self.path)


def read_examples(path: Path) -> Iterator[pa.RecordBatch]:
    """The examples of a file as columns of SCHEMA."""
    first = 0
    records = read_records(path)
    while block := list(islice(records, ROWS)):
        features = [_split(path, first + number, data) for number, data in enumerate(block)]
        columns = {name: _column(path, first, name, [one[name] for one in features]) for name in KINDS}
        yield _to_batch(path, first, columns)
        first += len(block)


def _split(path: Path, number: int, data: bytes) -> dict[str, Feature]:
    try:
        found = split_example(data)
    except BrokenMessage as error:
        raise TextmillError(f"{path}: record {number:,} is not a tf.train.Example: {error}; {AGAIN}") from None
    if unknown := [name for name in found if name not in KINDS]:
        raise TextmillError(
            f"{path}: record {number:,} has the unknown feature '{unknown[0]}'; "
            f"an example of BERT has {', '.join(KINDS)}"
        )
    if missing := [name for name in KINDS if name not in found]:
        raise TextmillError(
            f"{path}: record {number:,} has no feature '{missing[0]}'; an example of BERT has {', '.join(KINDS)}"
        )
    for name, feature in found.items():
        if feature.kind != KINDS[name]:
            kinds = f"{KIND_NAMES.get(feature.kind, 'something else')}, not {KIND_NAMES[KINDS[name]]}"
            raise TextmillError(f"{path}: record {number:,}: feature '{name}' has {kinds}; make the file again")
    return found


def _column(path: Path, first: int, name: str, features: list[Feature]) -> NDArray[Any]:
    """[examples, values]: the values of a feature; raises an error if examples have different numbers of them."""
    if KINDS[name] == FLOATS:
        sizes = [len(feature.data) // 4 for feature in features]
        broken = any(len(feature.data) % 4 for feature in features)
        values: NDArray[Any] = np.zeros(0) if broken else np.frombuffer(b"".join(one.data for one in features), "<f4")
    else:
        sizes = [int(np.count_nonzero(np.frombuffer(feature.data, np.uint8) < 128)) for feature in features]
        try:
            values = decode_varints(b"".join(feature.data for feature in features))
            broken = False
        except BrokenMessage:
            values = np.zeros(0)
            broken = True
    if broken or sum(sizes) != len(values):
        raise TextmillError(f"{path}: near record {first:,}: feature '{name}' is not readable; make the file again")
    if different := [number for number, size in enumerate(sizes) if size != sizes[0]]:
        raise TextmillError(
            f"{path}: record {first + different[0]:,}: feature '{name}' has {sizes[different[0]]} values, others have "
            f"{sizes[0]}; all examples need the same length"
        )
    return values.reshape(len(features), sizes[0])


def _to_batch(path: Path, first: int, columns: dict[str, NDArray[Any]]) -> pa.RecordBatch:
    """Examples as columns of SCHEMA; a prediction with weight 0 is padding."""
    ids = columns["input_ids"]
    count, length = ids.shape
    widths = {name: columns[name].shape[1] for name in KINDS}
    predicted = widths["masked_lm_positions"]
    expected = {"input_mask": length, "segment_ids": length, "masked_lm_ids": predicted, "masked_lm_weights": predicted}
    for name, width in {**expected, "next_sentence_labels": 1}.items():
        if widths[name] != width:
            raise TextmillError(
                f"{path}: record {first:,}: feature '{name}' has {widths[name]} values, not {width}; {AGAIN}"
            )
    labels = np.full((count, length), IGNORED, np.int64)
    rows, places = np.nonzero(columns["masked_lm_weights"] > 0)
    positions = columns["masked_lm_positions"][rows, places]
    if len(positions) and (int(positions.min()) < 0 or int(positions.max()) >= length):
        wrong = int(rows[(positions < 0) | (positions >= length)][0])
        raise TextmillError(
            f"{path}: record {first + wrong:,} predicts a token outside of its {length} positions; {AGAIN}"
        )
    labels[rows, positions] = columns["masked_lm_ids"][rows, places]
    arrays = [ids, columns["input_mask"], columns["segment_ids"], labels, columns["next_sentence_labels"]]
    return pa.RecordBatch.from_arrays([_list_array(values) for values in arrays], schema=SCHEMA)


def _list_array(values: NDArray[Any]) -> pa.ListArray:
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(values, np.int64).ravel()))


def to_examples(rows: Batch, predictions: int) -> list[bytes]:
    """Samples of the masked layout as examples, one sample per row, with lists of `predictions` predictions."""
    chosen = rows.labels != IGNORED
    counts = chosen.sum(1)
    filled = np.arange(predictions) < counts[:, None]
    positions = np.zeros(filled.shape, np.int64)
    ids = np.zeros(filled.shape, np.int64)
    positions[filled] = np.nonzero(chosen)[1]
    ids[filled] = rows.labels[chosen]
    assert rows.documents is not None
    assert rows.types is not None
    pair = np.zeros((len(counts), 1), np.int64) if rows.pair_labels is None else rows.pair_labels[:, :1]
    return build_examples(
        {
            "input_ids": rows.inputs.astype(np.int64),
            "input_mask": (rows.documents > 0).astype(np.int64),
            "segment_ids": rows.types.astype(np.int64),
            "masked_lm_positions": positions,
            "masked_lm_ids": ids,
            "masked_lm_weights": filled.astype(np.float32),
            "next_sentence_labels": pair.astype(np.int64),
        }
    )


def plan_example_files(
    folder: Path, prefix: Path, tokenizer: Path, train: TrainConfig, epochs: int
) -> list[ExampleFile]:
    """The files of a split, whose store has this prefix: all epochs of train, shuffled, and the other splits once."""
    settings = train.masked
    if not has_spans(open_store(prefix), settings):
        return []
    length = int(train.length or 0)
    is_train = prefix.name == "train"
    whole = ExampleFile(prefix, range(0), folder, tokenizer, length, train.seed if is_train else None, settings)
    count = whole.open_layout().samples_per_epoch * (epochs if is_train else 1)
    files = max(1, round(count * length / FILE_TOKENS))
    return [
        replace(
            whole,
            samples=range(count * number // files, count * (number + 1) // files),
            path=folder / f"{prefix.name}-{number:05d}-of-{files:05d}.tfrecord",
        )
        for number in range(files)
    ]


@dataclass(frozen=True)
class ExampleFile:
    """A task for one worker: consecutive samples of the masked layout, one per row, and the file to write them to."""

    prefix: Path
    samples: range
    path: Path
    tokenizer: Path
    length: int
    seed: int | None
    settings: MaskedConfig

    def open_layout(self) -> MaskedLayout:
        """The layout that builds the samples."""
        return MaskedLayout(
            open_store(self.prefix),
            length=self.length,
            seed=self.seed,
            tokens=masked_tokens_of(open_tokenizer(self.tokenizer), self.settings),
            settings=self.settings,
            folder=self.prefix.parent / EXAMPLE_SPANS,
            packs=False,
        )

    def write(self) -> int:
        """Write the file unless it exists already; return how many examples it has."""
        if not self.path.exists():
            layout = self.open_layout()
            predictions = int(layout.tokens.rule.predictions(np.array([self.length]))[0])
            with atomic_writer(self.path) as stream:
                for start in range(self.samples.start, self.samples.stop, ROWS):
                    rows = layout.build_samples(np.arange(start, min(start + ROWS, self.samples.stop), dtype=np.int64))
                    write_records(stream, to_examples(rows, self.settings.max_predictions or predictions))
        return count_records(self.path)
