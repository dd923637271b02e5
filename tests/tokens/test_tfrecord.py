"""TFRecord files: checksums, round trips with the tfrecord package, damaged files, and training data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tfrecord import TFRecordWriter, example_pb2, tfrecord_loader

from textmill.cli import main
from textmill.config import MaskedConfig, RunConfig
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.loader import open_batches, valid_batches
from textmill.tokens.batches.masked import MaskedLayout
from textmill.tokens.batches.masking import masked_tokens_of
from textmill.tokens.bert_examples import read_examples, to_examples
from textmill.tokens.splits import open_splits
from textmill.tokens.store import open_store
from textmill.tokens.tfrecord import (
    build_examples,
    count_records,
    crc32c,
    decode_varints,
    encode_varints,
    is_tfrecord,
    read_records,
    split_example,
    write_records,
)
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

TYPES = {
    "input_ids": "int",
    "input_mask": "int",
    "segment_ids": "int",
    "masked_lm_positions": "int",
    "masked_lm_ids": "int",
    "masked_lm_weights": "float",
    "next_sentence_labels": "int",
}


def example_of(number: int, length: int = 12, predictions: int = 3) -> dict[str, Any]:
    """An example with one prediction of padding."""
    return {
        "input_ids": [101, *range(500 + number, 500 + number + length - 2), 102],
        "input_mask": [1] * (length - 2) + [0, 0],
        "segment_ids": [0] * 5 + [1] * (length - 5),
        "masked_lm_positions": [2, 7, 0][:predictions],
        "masked_lm_ids": [30000, 128, 0][:predictions],
        "masked_lm_weights": [1.0, 1.0, 0.0][:predictions],
        "next_sentence_labels": [number % 2],
    }


def write_with_package(path: Path, examples: list[dict[str, Any]], **types: str) -> None:
    writer = TFRecordWriter(str(path))
    for one in examples:
        writer.write({name: (values, (TYPES | types)[name]) for name, values in one.items()})
    writer.close()


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
        (b"a", 0xC1D04330),
    ],
)
def test_checksums_are_those_of_rfc_3720(data: bytes, expected: int) -> None:
    assert crc32c(data) == expected


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30), floats=st.lists(st.floats(width=32), max_size=9)
)
def test_examples_equal_those_of_protobuf(numbers: list[int], floats: list[float]) -> None:
    mine = build_examples({"a": np.array([numbers], np.int64), "b": np.array([floats], np.float32)})[0]
    theirs = example_pb2.Example.FromString(mine)
    assert list(theirs.features.feature["a"].int64_list.value) == numbers
    assert np.array_equal(theirs.features.feature["b"].float_list.value, floats, equal_nan=True)
    for data in (mine, theirs.SerializeToString()):
        found = split_example(data)
        assert decode_varints(found["a"].data).tolist() == numbers
        assert np.array_equal(np.frombuffer(found["b"].data, "<f4"), np.array(floats, np.float32), equal_nan=True)
    assert decode_varints(encode_varints(np.array([numbers], np.int64))[0]).tolist() == numbers


def test_files_of_the_package_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.tokens.bert_examples.ROWS", 4)
    path = tmp_path / "train.tfrecord"
    write_with_package(path, [example_of(number) for number in range(10)])
    assert is_tfrecord(path)
    assert count_records(path) == 10
    rows = [row for batch in read_examples(path) for row in batch.to_pylist()]
    assert len(rows) == 10
    for number, row in enumerate(rows):
        expected = example_of(number)
        labels = [IGNORED] * 12
        labels[2], labels[7] = 30000, 128
        assert row == {
            "input_ids": expected["input_ids"],
            "attention_mask": expected["input_mask"],
            "token_type_ids": expected["segment_ids"],
            "labels": labels,
            "next_sentence_label": [number % 2],
        }


def test_samples_are_written_as_the_package_reads_them(tmp_path: Path) -> None:
    inputs = np.array([[2, 4, 11, 3, 12, 3, 0, 0], [2, 13, 3, 14, 4, 4, 3, 0]], np.int32)
    labels = np.full((2, 8), IGNORED, np.int32)
    labels[0, 1], labels[1, 4], labels[1, 5] = 10, 15, 16
    documents, types = (
        (inputs > 0).astype(np.int32),
        np.array([[0] * 4 + [1, 1, 0, 0], [0] * 3 + [1] * 4 + [0]], np.int32),
    )
    pairs = np.full((2, 8), IGNORED, np.int32)
    pairs[:, 0] = [0, 1]
    path = tmp_path / "a.tfrecord"
    with open(path, "wb") as stream:
        write_records(stream, to_examples(Batch(inputs, labels, np.arange(len(inputs)), documents, types, pairs), 3))
    found = list(tfrecord_loader(str(path), None, TYPES))
    for row, (positions, ids, weights) in enumerate(
        [([1, 0, 0], [10, 0, 0], [1, 0, 0]), ([4, 5, 0], [15, 16, 0], [1, 1, 0])]
    ):
        assert found[row]["input_ids"].tolist() == inputs[row].tolist()
        assert found[row]["input_mask"].tolist() == documents[row].tolist()
        assert found[row]["segment_ids"].tolist() == types[row].tolist()
        assert found[row]["masked_lm_positions"].tolist() == positions
        assert found[row]["masked_lm_ids"].tolist() == ids
        assert found[row]["masked_lm_weights"].tolist() == weights
        assert np.atleast_1d(found[row]["next_sentence_labels"]).tolist() == [row]


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "train.tfrecord"
    write_with_package(path, [example_of(number) for number in range(3)])
    whole = path.read_bytes()
    size = len(whole) // 3
    flipped = bytearray(whole)
    flipped[size + 40] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(TextmillError, match=r"train\.tfrecord: record 1 is damaged \(its checksum"):
        list(read_records(path))
    flipped = bytearray(whole)
    flipped[2 * size] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(TextmillError, match=r"record 2 is damaged \(the checksum of its length"):
        count_records(path)
    for cut in (len(whole) - 1, 2 * size + 5, 2 * size + 12):
        path.write_bytes(whole[:cut])
        with pytest.raises(TextmillError, match=r"train\.tfrecord: is truncated in record 2"):
            list(read_records(path))


@pytest.mark.parametrize(
    ("change", "types", "message"),
    [
        ({"extra": [1]}, {"extra": "int"}, "record 1 has the unknown feature 'extra'"),
        ({"segment_ids": None}, {}, "record 1 has no feature 'segment_ids'"),
        ({"segment_ids": [0] * 11}, {}, "record 1: feature 'segment_ids' has 11 values, others have 12"),
        ({"input_mask": [0.5] * 12}, {"input_mask": "float"}, "feature 'input_mask' has floats, not integers"),
        ({"masked_lm_positions": [2, 12, 0]}, {}, "record 1 predicts a token outside of its 12 positions"),
    ],
)
def test_wrong_features_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], types: dict[str, str], message: str
) -> None:
    path = tmp_path / "train.tfrecord"
    wrong = {name: values for name, values in {**example_of(1), **change}.items() if values is not None}
    writer = TFRecordWriter(str(path))
    writer.write({name: (values, TYPES[name]) for name, values in example_of(0).items()})
    writer.write({name: (values, (TYPES | types)[name]) for name, values in wrong.items()})
    writer.close()
    with pytest.raises(TextmillError, match=message):
        list(read_examples(path))


def test_a_record_that_is_no_example_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    with open(path, "wb") as stream:
        write_records(stream, [b"\x0a\xff\xff"])
    with pytest.raises(TextmillError, match=r"record 0 is not a tf\.train\.Example"):
        list(read_examples(path))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A corpus of sentences, written as a store and as TFRecords of two epochs."""
    folder = tmp_path_factory.mktemp("project")
    text = "\n\n".join(
        " ".join(f"The wheel number {word} of mill {number} turns slowly." for word in range(6)) for number in range(60)
    )
    (folder / "text.txt").write_text(text, encoding="utf-8")
    config = RunConfig.model_validate(
        {
            "folder": str(folder),
            "corpus": {
                "sources": [str(folder / "text.txt")],
                "documents": "block",
                "sentences": "split",
                "split": [0.8, 0.1, 0.1],
                "dedup": "none",
            },
            "tokenizer": {"kind": "wordpiece", "vocab": 300},
            "tokens": {"level": "sentence", "append_end": False, "kind": "tfrecord", "tfrecord_epochs": 2},
            "train": {"layout": "masked", "length": 32, "masked": {"max_predictions": 5}, "batch": 4},
            "runner": {"kind": "local", "workers": 1},
        }
    )
    prepare(config)
    tokenize(config)
    return config


def test_tokenize_writes_examples_of_the_masked_layout(project: RunConfig) -> None:
    folder = project.folder_of("tokens")
    tokenizer = open_tokenizer(project.folder_of("tokenizer"))
    settings_ = MaskedConfig(max_predictions=5)
    layout = MaskedLayout(
        open_store(folder / "train"),
        length=32,
        seed=1234,
        tokens=masked_tokens_of(tokenizer, settings_),
        settings=settings_,
        packs=False,
    )
    expected = layout.build_samples(np.arange(2 * layout.samples_per_epoch))
    (path,) = (folder / "tfrecord").glob("train-*.tfrecord")
    found = list(tfrecord_loader(str(path), None, TYPES))
    assert len(found) == len(expected.inputs) > 100
    assert [one["input_ids"].tolist() for one in found] == expected.inputs.tolist()
    assert {len(one["masked_lm_ids"]) for one in found} == {5}
    assert not (folder / "tfrecord-index").exists()


def test_examples_are_training_data(project: RunConfig, tmp_path: Path) -> None:
    files = project.folder_of("tokens") / "tfrecord"
    tree = project.model_dump(mode="json")
    tree |= {
        "tokenizer": {"use": str(project.folder_of("tokenizer"))},
        "tokens": {"use": [str(files)], "folder": str(tmp_path / "tokens")},
        "train": {"layout": "masked", "length": 32, "batch": 4},
    }
    config = RunConfig.model_validate(tree)
    tokenize(config)
    splits = open_splits(config)
    batches = open_batches(config.train, splits, length=32, folder=tmp_path)
    rows = [row for batch in read_examples(next(files.glob("train-*"))) for row in batch.to_pylist()]
    assert batches.layouts[0].samples_per_epoch == len(rows)
    by_inputs = {tuple(row["input_ids"]): row for row in rows}
    batch = batches.batch_at(1)
    assert batch.documents is not None
    assert batch.types is not None
    assert batch.pair_labels is not None
    for number in range(4):
        row = by_inputs[tuple(batch.inputs[number].tolist())]
        assert batch.labels[number].tolist() == row["labels"]
        assert batch.documents[number].tolist() == row["attention_mask"]
        assert batch.types[number].tolist() == row["token_type_ids"]
        assert batch.pair_labels[number].tolist() == [*row["next_sentence_label"], *[IGNORED] * 31]
    masked = {"layout": "masked", "length": 32, "batch": 4, "masked": {"pairs": "none"}}
    alone = RunConfig.model_validate({**tree, "train": masked}).train
    assert open_batches(alone, splits, length=32, folder=tmp_path).batch_at(1).pair_labels is None
    other = RunConfig.model_validate({**tree, "train": {"layout": "features", "length": 32, "batch": 4}})
    with pytest.raises(TextmillError, match=r"has masked examples; set train\.layout=masked"):
        open_batches(other.train, open_splits(other), length=32, folder=None)
    assert sum(len(one.inputs) for one in valid_batches(config.train, splits, length=32)) > 0


def test_a_list_of_files_with_blanks_between(project: RunConfig, tmp_path: Path) -> None:
    """As Megatron's --train-data has them, from a YAML file in another folder."""
    (source,) = (project.folder_of("tokens") / "tfrecord").glob("train-*.tfrecord")
    (tmp_path / "data").mkdir()
    for name in ("a.tfrecord", "b.tfrecords"):
        shutil.copy(source, tmp_path / "data" / name)
    tree = {
        "folder": "run",
        "tokenizer": {"use": str(project.folder_of("tokenizer"))},
        "tokens": {"use": ["data/a.tfrecord data/b.tfrecords"]},
        "corpus": {"split": [100, 0, 0]},
        "train": {"layout": "masked", "length": 32, "batch": 4},
        "runner": {"workers": 1},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    assert main(["tokenize", str(tmp_path / "mine.yaml")]) == 0
    rows = sum(batch.num_rows for batch in read_examples(source))
    assert len(open_store(tmp_path / "run" / "tokens" / "train")) == 2 * rows


def test_a_length_is_needed(project: RunConfig, tmp_path: Path) -> None:
    tree = project.model_dump(mode="json")
    tree["train"].pop("length")
    tree["tokens"]["folder"] = str(tmp_path / "tokens")
    with pytest.raises(TextmillError, match=r"train\.length: is not set"):
        tokenize(RunConfig.model_validate(tree))


@pytest.mark.parametrize(("types", "pairs", "wrong"), [(2, 0, "token_type_ids"), (0, 2, "next_sentence_label")])
def test_numbers_that_are_no_class_are_refused(types: int, pairs: int, wrong: str, tmp_path: Path) -> None:
    from textmill.tokens.batches.features import _check_classes

    rows = np.zeros((3, 4), np.int64)
    _check_classes(rows, rows + IGNORED, tmp_path, 7)
    with pytest.raises(TextmillError, match=rf"row 8: '{wrong}' has a number other than 0 and 1; make the file again"):
        _check_classes(
            rows + types * (np.arange(3) == 1)[:, None], rows + pairs * (np.arange(3) == 1)[:, None], tmp_path, 7
        )
