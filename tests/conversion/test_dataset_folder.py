"""`export.kind=dataset`: the datasets library and textmill read the documents of the corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from textmill.config import RunConfig
from textmill.conversion import export
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError


def config_of(folder: Path, sources: list[Path], **corpus: Any) -> RunConfig:
    tree = {
        "folder": str(folder),
        "corpus": {"sources": [str(one) for one in sources], "split": [80, 10, 10], **corpus},
        "runner": {"workers": 1},
    }
    return RunConfig.model_validate(tree)


def with_export(config: RunConfig, folder: Path, **settings: Any) -> RunConfig:
    changed = config.export.model_copy(update={"kind": "dataset", "folder": str(folder), **settings})
    return config.model_copy(update={"export": changed})


def documents_of(corpus: Path) -> dict[str, list[str]]:
    return {split: [one.text for one in open_corpus(corpus, split)] for split in ("train", "valid", "test")}


def test_the_documents_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    (tmp_path / "deep").mkdir()
    rows = [
        {"text": f"Değirmen {number}: bir metin, mail@example.org.", "title": f"t{number}"} for number in range(200)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[3]]), encoding="utf-8")
    (tmp_path / "deep" / "b.txt").write_text("Tek satır.\n\nIkinci satır.", encoding="utf-8")
    config = config_of(
        tmp_path / "my", [tmp_path / "a.jsonl", tmp_path / "deep"], keep_fields=["title"], rules=["emails", "spaces"]
    )
    corpus = prepare(config)
    expected = documents_of(corpus)
    out = tmp_path / "shared"
    assert export(with_export(config, out, license="cc0-1.0")) == out

    found = datasets.load_dataset(str(out), cache_dir=str(tmp_path / "cache"))
    assert {
        split: found[name]["text"][:] for split, name in [("train", "train"), ("valid", "validation"), ("test", "test")]
    } == expected
    assert set(found["train"].column_names) == {"text", "source", "id", "meta"}
    assert set(found["train"]["source"]) == {"a.jsonl", "deep/b.txt"}

    again = prepare(config_of(tmp_path / "again", [out], rules=["spaces"]))
    assert {split: sorted(texts) for split, texts in documents_of(again).items()} == {
        split: sorted(texts) for split, texts in expected.items()
    }

    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license: cc0-1.0" in card
    assert "| `a.jsonl` | 201 | 200 | 1 | 0 |" in card
    assert "| changed by the rule `emails` | 201 |" in card
    assert "| dropped: duplicate | 1 |" in card
    assert str(tmp_path) not in card
    assert export(with_export(config, out, license="cc0-1.0")) == out  # done already
    with pytest.raises(TextmillError, match="made from other settings"):
        export(with_export(config, out))


def test_conversations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [
        [{"role": "user", "content": f"Soru {number}?"}, {"role": "assistant", "content": "Cevap."}]
        for number in range(30)
    ]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in turns), encoding="utf-8")
    config = config_of(tmp_path / "my", [tmp_path / "c.jsonl"], chat="messages")
    prepare(config)
    export(with_export(config, tmp_path / "shared"))
    found = datasets.load_dataset(str(tmp_path / "shared"), cache_dir=str(tmp_path / "cache"))
    messages = [row for split in found.values() for row in split["messages"]]
    assert sorted(messages, key=str) == sorted(turns, key=str)
    again = prepare(config_of(tmp_path / "again", [tmp_path / "shared"], chat="messages"))
    assert sorted(one.turns or () for one in open_corpus(again)) == sorted(
        tuple((turn["role"], turn["content"]) for turn in one) for one in turns
    )
