"""Existing tokens: datasets with `input_ids` become stores, stores are used in place, and all of them train."""

from __future__ import annotations

import json
import os
import pickle
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.cli import main
from textmill.config import RunConfig, TokenizerConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.tokens import existing_tokens as tables
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.existing_tokens import ListColumn, Table, split_borders, strip_padding, tokenize_existing
from textmill.tokens.splits import open_splits
from textmill.tokens.store import StoreWriter, TokenStore
from textmill.tokens.vocabulary.tokenizer import fit

Rows = list[list[int]]
WORDS = ["the", "mill", "stands", "by", "a", "river", "물레방아는", "çark", "döner"]
TINY = [
    "model.size=nano",
    "model.shape.layers=1",
    "model.shape.width=16",
    "model.shape.heads=2",
    "train.batch=4",
    "train.steps=2",
    "engine.device=cpu",
    "sample.max_tokens=2",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    fit(iter([[" ".join(WORDS)]]), TokenizerConfig(vocab=260)).save(folder)
    return folder


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tables, "ROWS", 7)  # so that batches end inside files, splits and rows of a dataset
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def rows_of(seed: int, count: int, longest: int = 30) -> Rows:
    dice = random.Random(seed)
    return [dice.choices(range(256), k=dice.randint(0, longest)) for _ in range(count)]


def config_for(folder: Path, tokenizer: Path, *used: Path | dict[str, Any], **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "folder": str(folder),
            "tokens": {"use": [one if isinstance(one, dict) else str(one) for one in used]},
            "tokenizer": {"use": str(tokenizer)},
            "corpus": {"split": [80.0, 10.0, 10.0]},
            "runner": {"workers": 1},
            "train": train,
        }
    )


def documents_of(store: TokenStore) -> Rows:
    edges = store.document_starts(np.arange(len(store) + 1))
    return [store.ids[begin:end].tolist() for begin, end in pairwise(edges)]


def split_rows(config: RunConfig, number: int = 0) -> dict[str, Rows]:
    stores = open_splits(config).by_split
    return {split: documents_of(stores[split][number].store) for split in SPLITS}


def test_a_saved_dataset_is_converted_split_by_split(tmp_path: Path, tokenizer: Path) -> None:
    train, valid = rows_of(1, 50), rows_of(2, 9)
    saved = {
        "train": datasets.Dataset.from_dict({"input_ids": train, "other": ["x"] * 50}),
        "validation": datasets.Dataset.from_dict({"input_ids": valid, "other": ["x"] * 9}),
    }
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved", num_shards={"train": 3, "validation": 1})
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "saved")
    tokenize_existing(config)
    assert split_rows(config) == {"train": train, "valid": valid, "test": []}
    assert main(["check", str(tmp_path / "run" / "tokens")]) == 0
    again = config_for(tmp_path / "other", tokenizer, tmp_path / "run" / "tokens")
    assert split_rows(again) == split_rows(config), "the result is a normal tokens folder"


def test_a_dataset_without_splits_is_split_in_its_order(tmp_path: Path, tokenizer: Path) -> None:
    rows = rows_of(3, 61)
    datasets.Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "saved", num_shards=2)
    (tmp_path / "parquet").mkdir()
    for number in range(3):  # as Beam names its shards, and in several row groups
        table = pa.table({"input_ids": rows[number * 21 : (number + 1) * 21]})
        pq.write_table(table, tmp_path / "parquet" / f"rows-{number:05d}-of-00003", row_group_size=5)
    edges = split_borders([80, 10, 10], 61)
    wanted = {split: rows[edges[number] : edges[number + 1]] for number, split in enumerate(SPLITS)}
    assert all(wanted.values())
    used = [tmp_path / "saved", tmp_path / "parquet", tmp_path / "parquet" / "rows-*"]
    config = config_for(tmp_path / "run", tokenizer, *used)
    tokenize_existing(config)
    assert [split_rows(config, number) for number in range(3)] == [wanted] * 3


def test_names_of_parquet_files_decide_their_split(tmp_path: Path, tokenizer: Path) -> None:
    sides = {
        "train-00000-of-00002": "train",
        "train-00001-of-00002": "train",
        "validation-00000-of-00001": "valid",
        "test": "test",
    }
    wanted: dict[str, Rows] = {split: [] for split in SPLITS}
    (tmp_path / "data").mkdir()
    for number, (name, side) in enumerate(sides.items()):
        rows = rows_of(number, 10)
        wanted[side] += rows
        lists = pa.array(rows, pa.large_list(pa.int32()))
        pq.write_table(pa.table({"input_ids": lists}), tmp_path / "data" / f"{name}.parquet")
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "data")
    tokenize_existing(config)
    assert split_rows(config) == wanted
    os.rename(tmp_path / "data" / "test.parquet", tmp_path / "data" / "rest.parquet")
    with pytest.raises(TextmillError, match=r"rest\.parquet is not named after a split"):
        tokenize_existing(config, "yes")


def test_masked_padding_is_removed(tmp_path: Path, tokenizer: Path) -> None:
    """Padded on the right, on the left, and not at all, as transformers' own tokenizer pads."""
    hf = transformers.AutoTokenizer.from_pretrained(tokenizer)
    hf.pad_token = hf.eos_token
    texts = ["the mill", "a river by the mill stands", "", "물레방아는 a mill"]
    plain = hf(texts)["input_ids"]
    for side in ("right", "left"):
        hf.padding_side = side
        padded = hf(texts, padding=True)
        assert len({len(row) for row in padded["input_ids"]}) == 1
        longest = len(padded["input_ids"][0])
        kind = datasets.Features(
            {
                "input_ids": datasets.Sequence(datasets.Value("int32"), longest),
                "attention_mask": datasets.Sequence(datasets.Value("int8")),
            }
        )
        rows = {name: padded[name] for name in ("input_ids", "attention_mask")}
        datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows, features=kind)}).save_to_disk(tmp_path / side)
        config = config_for(tmp_path / f"run {side}", tokenizer, tmp_path / side)
        tokenize_existing(config)
        assert split_rows(config)["train"] == plain


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=8), max_size=6))
def test_only_masked_positions_at_the_ends_of_a_row_are_removed(rows: list[list[tuple[int, bool]]]) -> None:
    def cut(row: list[tuple[int, bool]]) -> list[int]:
        seen = [place for place, (_, kept) in enumerate(row) if kept]
        return [token for token, _ in row[seen[0] : seen[-1] + 1]] if seen else []

    lengths = np.array([len(row) for row in rows], np.int64)
    flat = [pair for row in rows for pair in row]
    ids, mask = (ListColumn(np.array([pair[number] for pair in flat], np.int64), lengths) for number in range(2))
    found = strip_padding(ids, mask)
    wanted = [cut(row) for row in rows]
    assert found.lengths.tolist() == [len(row) for row in wanted]
    assert found.values.tolist() == [token for row in wanted for token in row]


@settings(max_examples=50, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_any_rows_of_any_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, sizes: list[int]) -> None:
    folder, count = tmp_path_factory.mktemp("files"), sum(sizes)
    rows = [[number] * (number % 4) for number in range(count)]
    paths = []
    for number, size in enumerate(sizes):
        begin = sum(sizes[:number])
        paths.append(folder / str(number))
        pq.write_table(
            pa.table({"input_ids": pa.array(rows[begin : begin + size], pa.list_(pa.int64()))}),
            paths[-1],
            row_group_size=6,
        )
    first = data.draw(st.integers(0, count))
    many = data.draw(st.integers(0, count - first))
    found, place = [], 0
    for _, begin, columns in Table(tuple(paths), first, many).read_columns("input_ids"):
        assert begin == place
        place += len(columns["input_ids"].lengths)
        found.append(columns["input_ids"].values)
    assert place == many
    assert np.concatenate([*found, []]).tolist() == [token for row in rows[first : first + many] for token in row]


def test_grouped_rows_give_the_same_labels_as_transformers(tmp_path: Path, tokenizer: Path) -> None:
    """A padded batch of rows of train.length has the same labels as a transformers model with labels=input_ids."""
    dice = random.Random(4)
    rows = [dice.choices(range(256), k=12) for _ in range(8)]
    grouped = {"input_ids": rows, "attention_mask": [[1] * 12] * 8, "labels": rows}
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(grouped)}).save_to_disk(tmp_path / "grouped")
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "grouped", layout="padded", length=12, batch=8)
    tokenize_existing(config)
    batch = open_batches(config.train, open_splits(config), length=12, folder=None).batch_at(0)
    assert sorted(batch.inputs.tolist()) == sorted(rows)
    assert (batch.labels != IGNORED).sum(1).tolist() == [11] * 8
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=258, n_positions=12, n_embd=16, n_layer=1, n_head=2)
    ).eval()
    inputs = torch.from_numpy(batch.inputs).long()
    with torch.no_grad():
        theirs = model(inputs, labels=inputs)
        ours = torch.nn.functional.cross_entropy(
            theirs.logits.flatten(0, 1), torch.from_numpy(batch.labels).long().flatten()
        )
    assert float(ours) == pytest.approx(float(theirs.loss), rel=1e-6)


def test_files_without_tokens_are_an_error(tmp_path: Path, tokenizer: Path) -> None:
    def refused(where: Path, message: str) -> None:
        with pytest.raises(TextmillError, match=message):
            tokenize_existing(config_for(tmp_path / "run", tokenizer, where))
        assert not (tmp_path / "run" / "tokens").exists()

    def parquet(name: str, **columns: Any) -> Path:
        pq.write_table(pa.table(columns), tmp_path / name)
        return tmp_path / name

    refused(tmp_path / "nothing", "no tokens found")
    refused(parquet("a", text=["x"]), r"no column 'input_ids'; found \['text'\]")
    refused(
        parquet("b", input_ids=[[1, 258]]), "token id 258, but the tokenizer's vocabulary has 258 tokens.*tokenizer.use"
    )
    refused(parquet("c", input_ids=[[1, -1]]), "the tokenizer's vocabulary has 258 tokens")
    refused(parquet("d", input_ids=[[1, None]]), "empty cells")
    refused(parquet("e", input_ids=[1, 2]), "has the type int64")
    refused(parquet("f", input_ids=[[1.5]]), "lists of double")
    refused(parquet("g", input_ids=[[1, 2]], attention_mask=[[1]]), "differ in length")
    (tmp_path / "h").write_bytes((tmp_path / "b").read_bytes()[:40])
    refused(tmp_path / "h", "not a complete Parquet file or Arrow stream")
    datasets.DatasetDict({"extra": datasets.Dataset.from_dict({"input_ids": [[1]]})}).save_to_disk(tmp_path / "dict")
    refused(tmp_path / "dict", "split 'extra'")
    state = tmp_path / "dict" / "extra" / "state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "_indices_data_files": [{"filename": "indices.arrow"}]})
    )
    refused(tmp_path / "dict" / "extra", "flatten_indices")


def test_a_dataset_must_be_converted_and_unchanged(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        pq.write_table(pa.table({"input_ids": rows_of(5, 20)}), tmp_path / f"{name}.parquet")
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "one.parquet")
    with pytest.raises(TextmillError, match="not converted to a token store yet; run: textmill tokenize"):
        open_splits(config)
    tokenize_existing(config)
    tokenize_existing(config)
    assert "done already" in capsys.readouterr().out
    with pytest.raises(TextmillError, match="not converted to a token store yet"):
        open_splits(config_for(tmp_path / "run", tokenizer, tmp_path / "two.parquet"))
    pq.write_table(pa.table({"input_ids": rows_of(6, 20)}), tmp_path / "one.parquet")
    with pytest.raises(TextmillError, match="made from other settings or inputs"):
        tokenize_existing(config)


def write_store(prefix: Path, rows: Rows) -> Path:
    with StoreWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add(rows)
    return prefix


def test_two_weighted_stores_through_all_commands(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (write_store(tmp_path / name, rows_of(number, 60)) for number, name in enumerate(("one", "two.v1")))
    (tmp_path / "textmill.yaml").write_text(
        f"tokens:\n  use: [{{path: {one.name}, weight: 3}}, {two.name}]\ncorpus: {{split: '80,10,10'}}\n"
    )
    arguments = [str(tmp_path), *TINY, "train.length=16"]
    assert main(["run", *arguments]) == 2
    assert "tokenizer.use: is not set" in capsys.readouterr().err
    assert main(["run", *arguments, f"tokenizer.use={tokenizer}"]) == 0
    message = capsys.readouterr().out
    assert "prepare: not needed" in message
    assert "nothing to do: tokens.use names token stores" in message
    assert "bits_per_byte" not in message
    assert not (tmp_path / "tokens").exists()
    [saved] = (tmp_path / "run" / "evaluation").glob("step-0000002-perplexity-valid-*.json")
    measured = json.loads(saved.read_text())
    stores = open_splits(config_for(tmp_path, tokenizer, one, two)).stores("valid")
    card = measured["perplexity"]["card"]
    assert (card["documents"], card["tokens"]) == (12, sum(store.tokens for store in stores))
    assert {name for name, value in measured["perplexity"].items() if isinstance(value, float)} == {
        f"{name}{of}" for name in ("loss", "token_perplexity") for of in ("", "/unigram", "/bigram")
    }
    assert main(["evaluate", str(tmp_path / "run"), "evaluate.split=test"]) == 0
    assert ["documents", "12"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert main(["evaluate", str(tmp_path / "run"), "evaluate.split=test", "corpus.split=90,10,0"]) == 2
    assert "its test split is empty" in capsys.readouterr().err
    assert main(["run", *arguments, f"tokenizer.use={tokenizer}"]) == 0
    assert "done already" in capsys.readouterr().out


def test_a_dataset_and_a_store_through_all_commands(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {
        name: datasets.Dataset.from_dict({"input_ids": rows_of(number, 30)})
        for number, name in enumerate(("train", "validation"))
    }
    datasets.DatasetDict(saved).save_to_disk(tmp_path / "saved")
    write_store(tmp_path / "one", rows_of(7, 30))
    (tmp_path / "textmill.yaml").write_text(
        "tokens: {use: [one, saved]}\nrunner: {workers: 1}\ncorpus: {split: '80,10,10'}\n"
    )
    arguments = [str(tmp_path), *TINY, "train.length=16", f"tokenizer.use={tokenizer}", "train.layout=padded"]
    assert main(["run", *arguments]) == 0
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["manifest.json", "run.yaml", "used-1"]
    assert main(["run", str(tmp_path), *arguments[1:], "tokens.kind=features"]) == 2
    assert "remove one of them" in capsys.readouterr().err


def test_ids_outside_the_vocabulary_stop_training(
    tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_store(tmp_path / "one", [[1, 2, 3, 400]] * 50)
    arguments = [
        *TINY,
        f"folder={tmp_path}",
        f"tokens.use={tmp_path / 'one'}",
        f"tokenizer.use={tokenizer}",
        "train.length=16",
    ]
    (tmp_path / "some.yaml").touch()
    assert main(["train", str(tmp_path / "some.yaml"), *arguments]) == 2
    assert "token id 400, but the tokenizer's vocabulary has 258 tokens" in capsys.readouterr().err


def with_tokens(config: RunConfig, own_splits: bool = True, **tokens: list[str]) -> RunConfig:
    tree = config.model_dump()
    return RunConfig.model_validate(
        {**tree, "tokens": {**tree["tokens"], **tokens}, "corpus": {**tree["corpus"], "own_splits": own_splits}}
    )


def test_evaluation_data_of_any_name_is_not_trained_on(tmp_path: Path, tokenizer: Path) -> None:
    train, held, last = (rows_of(number, 40, longest=9) for number in range(3))
    write_store(tmp_path / "one", train)
    write_store(tmp_path / "two", held)
    pq.write_table(pa.table({"input_ids": last}), tmp_path / "three.parquet")
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "one")
    both = with_tokens(config, use_valid=[str(tmp_path / "two")], use_test=[str(tmp_path / "three.parquet")])
    tokenize_existing(both)
    assert {split: documents_of(one[0].store) for split, one in open_splits(both).by_split.items()} == {
        "train": train,
        "valid": held,
        "test": last,
    }
    only_test = with_tokens(config, use_test=[str(tmp_path / "two")])
    edges = split_borders([80, 10, 0], 40)
    assert edges == [0, 36, 40, 40]
    splits = open_splits(only_test).by_split
    assert documents_of(splits["train"][0].store) == train[:36]
    assert documents_of(splits["valid"][0].store) == train[36:], "valid is taken out of train if nothing names it"
    assert documents_of(splits["test"][0].store) == held
    batches = open_batches(both.train.model_copy(update={"batch": 8}), open_splits(both), length=16, folder=None)
    seen = {document for step in range(50) for _, _, document in batches.documents_at(step)}
    assert seen <= set(range(40)), "one store, of 40 documents"
    assert len(batches.layouts) == 1
    with pytest.raises(TextmillError, match=r"split has changed since it was converted"):
        open_splits(with_tokens(config, use_valid=[str(tmp_path / "two"), str(tmp_path / "three.parquet")]))


@pytest.mark.parametrize("name", ["wikitext.test", "my-gpt2_dev_text_document", "EVAL_1", "validation"])
def test_a_store_named_after_an_evaluation_split_is_not_trained_on(tmp_path: Path, tokenizer: Path, name: str) -> None:
    write_store(tmp_path / "train", rows_of(0, 40))
    write_store(tmp_path / name, rows_of(1, 40))
    split = "test" if "test" in name else "valid"
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "train", tmp_path / name)
    with pytest.raises(TextmillError, match=rf"{name}: is named after the {split} .* tokens\.use_{split} instead"):
        open_splits(config)
    assert len(open_splits(with_tokens(config, own_splits=False)).stores("train")) == 2


def test_names_of_datasets_decide_their_split(tmp_path: Path, tokenizer: Path) -> None:
    """The names that jax-lm-training gives its files; a dataset without splits may have such a name too."""
    rows = {name: rows_of(number, 12) for number, name in enumerate(("train", "test"))}
    for name, some in rows.items():
        pq.write_table(pa.table({"input_ids": some}), tmp_path / f"wikitext.{name}-00000-of-00001")
        datasets.Dataset.from_dict({"input_ids": some}).save_to_disk(tmp_path / f"saved-{name}")
    used = [tmp_path / "wikitext.train*", tmp_path / "wikitext.test*"]
    config = config_for(tmp_path / "run", tokenizer, *used)
    tokenize_existing(config)
    splits = open_splits(config)
    assert [documents_of(store) for store in splits.stores("train")] == [rows["train"]]
    assert [documents_of(store) for store in splits.stores("test")] == [rows["test"]]
    with pytest.raises(TextmillError, match=r"name it in tokens\.use_test instead"):
        open_splits(config_for(tmp_path / "run", tokenizer, tmp_path / "saved-train", tmp_path / "saved-test"))
    with pytest.raises(TextmillError, match=r"use_valid: .* has several splits \(test, train\)"):
        tokenize_existing(with_tokens(config, use_valid=[str(tmp_path / "wikitext.*")]))


class Code:
    """What numpy.load and pickle.load would run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_files_of_numpy(tmp_path: Path, tokenizer: Path, protocol: int) -> None:
    """A matrix, one long row, and the lists of arrays of binarized_text.pickle, also in a .npy of objects."""
    rows = [row or [1] for row in rows_of(4, 40)]
    arrays = [np.array(row, np.uint16) for row in rows]
    with open(tmp_path / "rows.pickle", "wb") as stream:
        pickle.dump(arrays, stream, protocol)
    objects = np.empty(len(rows), object)
    objects[:] = arrays
    np.save(tmp_path / "objects.npy", objects)
    matrix = np.random.default_rng(1).integers(0, 256, (40, 9), np.int32)
    np.save(tmp_path / "matrix.npy", matrix)
    np.save(tmp_path / "long.npy", matrix.ravel())
    used = [tmp_path / name for name in ("rows.pickle", "objects.npy", "matrix.npy", "long.npy")]
    config = config_for(tmp_path / "run", tokenizer, *used)
    tokenize_existing(config)
    found = [[row for part in split_rows(config, number).values() for row in part] for number in range(4)]
    assert found == [rows, rows, matrix.tolist(), [matrix.ravel().tolist()]]
    assert [len(split_rows(config, number)["train"]) for number in range(3)] == [32, 32, 32]


def test_files_of_numpy_with_something_else(tmp_path: Path, tokenizer: Path) -> None:
    canary = tmp_path / "canary"
    with open(tmp_path / "code.pickle", "wb") as stream:
        pickle.dump([Code(canary)], stream)
    np.save(tmp_path / "code.npy", np.array([Code(canary)], object))
    np.save(tmp_path / "floats.npy", np.ones((3, 3)))
    with open(tmp_path / "texts.pickle", "wb") as stream:
        pickle.dump(["a text"], stream)
    (tmp_path / "cut.npy").write_bytes((tmp_path / "floats.npy").read_bytes()[:50])
    (tmp_path / "cut.pickle").write_bytes((tmp_path / "code.pickle").read_bytes()[:9])
    for name, part in {
        "code.pickle": "only arrays and numbers are read",
        "code.npy": "only arrays and numbers are read",
        "floats.npy": "expected a list of integers",
        "texts.pickle": "has a row that is a str",
        "cut.npy": "not a complete .npy file",
        "cut.pickle": "not a complete pickle",
    }.items():
        with pytest.raises(TextmillError, match=f"{name}: .*{part}"):
            tokenize_existing(config_for(tmp_path / "run", tokenizer, tmp_path / name))
    assert not canary.exists()


def test_the_files_of_nanogpt(tmp_path: Path, tokenizer: Path) -> None:
    """train.bin and val.bin have ids of two bytes and nothing else; a store has an .idx next to its .bin."""
    ids = {
        name: np.random.default_rng(seed).integers(0, 256, 500, np.uint16) for seed, name in enumerate(("train", "val"))
    }
    for name, values in ids.items():
        values.tofile(tmp_path / f"{name}.bin")
    config = config_for(tmp_path / "run", tokenizer, tmp_path / "train.bin", length=8)
    config = with_tokens(config, use_valid=[str(tmp_path / "val.bin")])
    tokenize_existing(config)
    splits = open_splits(config).by_split
    assert documents_of(splits["train"][0].store) == [ids["train"].tolist()]
    assert documents_of(splits["valid"][0].store) == [ids["val"].tolist()]
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(TextmillError, match=r"odd\.bin: has 3 bytes"):
        tokenize_existing(config_for(tmp_path / "odd", tokenizer, tmp_path / "odd.bin"))


def test_one_bin_file_of_a_whole_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With corpus.split=100,0,0 there is one .bin, as Megatron's tool writes; training then splits its documents."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("".join(f"The mill {number} turns.\n" for number in range(40)))
    small = ["corpus.documents=line", "tokenizer.vocab=270", "runner.workers=1", "folder=one"]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, "quickstart", "corpus.sources=a.txt", "corpus.split=100,0,0", *small]) == 0
    tree = {"folder": "two", "tokens": {"use": ["one/tokens/train"]}, "tokenizer": {"use": "one/tokenizer"}}
    tree["corpus"] = {"split": [80.0, 10.0, 10.0]}
    splits = open_splits(RunConfig.model_validate(tree))
    assert [len(splits.by_split[split][0].store) for split in SPLITS] == [32, 4, 4]
