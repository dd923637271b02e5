"""Sources that have splits keep them: no row of an evaluation split is trained on."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from tests.support.mongo_process import open_database
from textmill.cli import main
from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.formats.mongo import find as find_in_mongo
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer

NAMES = {"train": "train", "validation": "valid", "test": "test"}
ROWS = 40


def texts_of(split: str) -> list[str]:
    return [f"row {number} of the split {split}" for number in range(ROWS)]


def prepared(folder: Path, *sources: str, **corpus: Any) -> dict[str, list[str]]:
    train = {"layout": "labelled", "length": 32} if "labels" in corpus else {}
    tree = {"folder": str(folder), "corpus": {"sources": list(sources), **corpus}, "train": train}
    done = prepare(RunConfig.model_validate(tree))
    return {split: [row.text for row in open_corpus(done, split)] for split in SPLITS}


def expected() -> dict[str, list[str]]:
    return {split: texts_of(name) for name, split in NAMES.items()}


def save_dataset(folder: Path) -> str:
    rows = {name: datasets.Dataset.from_dict({"text": texts_of(name)}) for name in NAMES}
    datasets.DatasetDict(rows).save_to_disk(folder)
    return str(folder)


def write_files(folder: Path, pattern: str) -> str:
    for name in NAMES:
        path = folder / pattern.format(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(name)))
    return str(folder)


def test_a_saved_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = save_dataset(tmp_path / "saved")
    assert prepared(tmp_path / "kept", saved) == expected()
    assert "own splits" in (message := capsys.readouterr().out)
    assert "train 1 file, valid 1 file, test 1 file (corpus.own_splits=false pools them)" in message
    account = json.loads((tmp_path / "kept" / "corpus" / "account.json").read_text())
    assert sorted(account["source_splits"].values()) == ["test", "train", "valid"]
    pooled = prepared(tmp_path / "pooled", saved, own_splits=False)
    assert len(pooled["train"]) > 2 * ROWS
    assert "own splits" not in capsys.readouterr().out


@pytest.mark.parametrize("pattern", ["{}.jsonl", "{}/part-0.jsonl", "news.{}-00000.jsonl"])
def test_files_and_folders_by_name(tmp_path: Path, pattern: str) -> None:
    assert prepared(tmp_path / "kept", write_files(tmp_path / "dev data", pattern)) == expected()


def test_the_files_of_wikitext(tmp_path: Path) -> None:
    for name, split in NAMES.items():
        (tmp_path / f"wiki.{split}.tokens").write_text("\n\n".join(texts_of(name)))
    archive = shutil.make_archive(str(tmp_path / "wikitext-103-v1"), "zip", tmp_path)
    assert prepared(tmp_path / "run", archive, documents="block") == expected()


def test_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = datasets.load_from_disk(save_dataset(tmp_path / "saved"))
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config, split: saved[split] if split else saved)
    assert prepared(tmp_path / "kept", "hf:wikitext:raw") == expected()
    named = prepared(tmp_path / "named", "hf:wikitext:raw:train", "hf:wikitext:raw:test")
    assert named["test"] == texts_of("test")
    assert sorted(named["train"] + named["valid"]) == sorted(texts_of("train"))
    assert 0 < len(named["valid"]) < ROWS / 2, "valid is taken out of train"


def test_examples_with_labels(tmp_path: Path) -> None:
    for name in NAMES:
        rows = "".join(f"{text},{number % 2}\n" for number, text in enumerate(texts_of(name)))
        (tmp_path / f"{name}.csv").write_text(f"text,label\n{rows}")
    files = [str(tmp_path / f"{name}.csv") for name in NAMES]
    assert prepared(tmp_path / "run", *files, labels="sequence-classification") == expected()


def test_the_command_names_evaluation_data_without_a_train_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path / "data", "{}.jsonl")
    (tmp_path / "data" / "train.jsonl").rename(tmp_path / "data" / "news.jsonl")
    (tmp_path / "my.yaml").write_text("corpus: {sources: [data]}\nrunner: {workers: 1}\n")
    assert main(["prepare", str(tmp_path / "my.yaml")]) == 0
    message = capsys.readouterr().out
    assert "test.jsonl is named after the test split, but no source is the train split" in message
    assert main(["prepare", str(tmp_path / "my.yaml"), "corpus.source_splits=test.jsonl:test", "--force"]) == 0
    assert "test.jsonl is named after" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["files", "store", "features", "mongo"])
@pytest.mark.long_with("mongo")
def test_no_evaluation_row_in_the_batches_of_many_epochs(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row of an evaluation split has a marked word; no batch of training has it, and their own splits do."""
    mark = "QQQQ"
    folder = tmp_path / "data"
    sources = [str(folder)]
    marks = {name: "" if name == "train" else mark for name in NAMES}
    rows = {name: [f"the mill {marks[name]} {number} {name}" for number in range(ROWS)] for name in NAMES}
    servers = ExitStack()
    if kind == "mongo":
        mongo = servers.enter_context(open_database(tmp_path / "mongo"))
        for name, texts in rows.items():
            mongo.fill(name, texts)
        find_in_mongo(f"mongo:{mongo.write_config('all.json', COLLECTIONS=list(NAMES))}")
        assert "all.json: the collections of one file are one source" in capsys.readouterr().err
        sources = [f"mongo:{mongo.write_config(f'{name}.json', COLLECTIONS=[name])}" for name in NAMES]
    else:
        for name, texts in rows.items():
            lines = [json.dumps({"text": text}) for text in texts]
            folder.mkdir(exist_ok=True)
            (folder / f"news.{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings: dict[str, Any] = {"layout": "features", "length": 16} if kind == "features" else {"length": 16}
    features = {"max_length": 16, "min_length": 1, "stride": 8}
    tree = {
        "folder": str(tmp_path / "run"),
        "corpus": {"sources": sources},
        "tokenizer": {"vocab": 300},
        "tokens": {"kind": "features", "features": features} if kind == "features" else {},
        "runner": {"workers": 1},
        "train": {"batch": 2, **settings},
    }
    config = RunConfig.model_validate(tree)
    with servers:
        prepare(config)
    assert "the collections of one file" not in capsys.readouterr().err
    fit_tokenizer(config)
    done = tokenize(config)
    if kind == "store":  # the same tokens as stores of any name
        used = {"use": [str(done / "train")], "use_valid": [str(done / "valid")], "use_test": [str(done / "test")]}
        tree |= {"folder": str(tmp_path / "other"), "tokens": used}
        config = RunConfig.model_validate({**tree, "tokenizer": {"use": str(tmp_path / "run" / "tokenizer")}})
    splits = open_splits(config)
    for split in ("valid", "test"):
        (store,) = splits.stores(split)
        assert splits.tokenizer.decode(store.ids.tolist()).count(mark) == ROWS
    batches = open_batches(config.train, splits, length=16, folder=None)
    seen = np.concatenate([batches.batch_at(step).inputs for step in range(300)])
    texts = splits.tokenizer.decode(np.unique(seen, axis=0).ravel().tolist())
    assert "the mill" in texts
    assert mark not in texts
