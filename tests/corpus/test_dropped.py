"""Dropped documents are kept on request: with the rule, and the document that a duplicate repeats."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import get_args

import pyarrow.parquet as pq
import pytest

from textmill.cli import main
from textmill.config import CorpusConfig, RunConfig
from textmill.config.corpus import PresetName
from textmill.corpus import find_sources, records
from textmill.corpus.dropped import read_dropped
from textmill.corpus.prepare import prepare
from textmill.storage.stages import find_stage_damage

LONG = "The quick brown fox jumps over the lazy dog while the cat watches from the warm window sill. " * 3
OTHER = "Nothing at all in this second text has words in common with what stands in the first one. " * 3
FILES = {"a.jsonl": [LONG, "no", OTHER, LONG], "b.jsonl": [LONG + "Indeed.", OTHER, "x", "a text that is kept"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(find_sources, "FILE_BYTES", records.CHUNK_BYTES)  # a chunk for each file
    for name, texts in FILES.items():
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return tmp_path


def config_of(folder: Path, dedup: str = "near", workers: int = 1) -> RunConfig:
    corpus = {
        "sources": [str(folder / name) for name in FILES],
        "folder": str(folder / "corpus"),
        "min_chars": 5,
        "dedup": dedup,
        "keep_dropped": True,
        "split": [1],
    }
    return RunConfig.model_validate({"corpus": corpus, "runner": {"workers": workers}})


@pytest.mark.parametrize("dedup", ["near", "exact", "none"])
def test_every_dropped_document_is_kept_with_its_rule(folder: Path, dedup: str) -> None:
    result = prepare(config_of(folder, dedup))
    rows = list(read_dropped(result))
    account = json.loads((result / "account.json").read_text(encoding="utf-8"))
    assert Counter(row["rule"] for row in rows) == {rule: count for rule, count in account["dropped"].items() if count}
    found = {
        (Path(row["source"]).name, row["id"], row["rule"]): (
            row["duplicate_of_id"] and (Path(row["duplicate_of_source"]).name, row["duplicate_of_id"])
        )
        for row in rows
    }
    expected: dict[tuple[str, str, str], tuple[str, str] | None]
    expected = {("a.jsonl", "line 2", "short"): None, ("b.jsonl", "line 3", "short"): None}
    if dedup != "none":
        expected[("a.jsonl", "line 4", "duplicate")] = ("a.jsonl", "line 1")
        expected[("b.jsonl", "line 2", "duplicate")] = ("a.jsonl", "line 3")
    if dedup == "near":  # of two near-duplicates, the longer one is kept
        expected[("a.jsonl", "line 1", "near_duplicate")] = ("b.jsonl", "line 1")
    assert found == expected
    texts = {(Path(row["source"]).name, row["id"]): row["text"] for row in rows}
    assert all(FILES[name][int(place.split()[1]) - 1].strip() == text.strip() for (name, place), text in texts.items())
    assert not find_stage_damage(result)
    assert {"dropped-00000.parquet", "dropped-00001.parquet"} <= json.loads(
        (result / "manifest.json").read_text(encoding="utf-8")
    )["files"].keys()


def test_nothing_is_kept_by_default(folder: Path) -> None:
    config = config_of(folder)
    result = prepare(config.model_copy(update={"corpus": config.corpus.model_copy(update={"keep_dropped": False})}))
    assert not list(result.glob("dropped-*"))


def test_show(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    prepare(config_of(folder))
    capsys.readouterr()
    assert main(["show", "corpus", "--dropped", "near_duplicate"]) == 0
    printed = capsys.readouterr().out
    assert "corpus: 1 documents dropped by near_duplicate" in printed
    assert "--- a.jsonl, line 1: near_duplicate of b.jsonl, line 1 (similarity 0." in printed
    assert main(["show", "corpus", "--dropped", "all"]) == 0
    assert capsys.readouterr().out.count("--- ") == 5
    assert main(["show", "corpus", "--dropped", "language"]) == 2
    assert "rules that dropped any: duplicate, near_duplicate, short" in capsys.readouterr().err


def test_show_says_how_to_keep_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["prepare", str(folder / "a.yaml")]) == 2
    (folder / "a.yaml").write_text("corpus: {sources: [a.jsonl], split: [1]}\n", encoding="utf-8")
    assert main(["prepare", str(folder / "a.yaml")]) == 0
    assert main(["show", str(folder / "a.yaml"), "--dropped", "duplicate"]) == 2
    assert "corpus.keep_dropped=true --force" in capsys.readouterr().err


def test_a_file_can_be_opened_with_any_parquet_reader(folder: Path) -> None:
    table = pq.read_table(prepare(config_of(folder)) / "dropped-00000.parquet")
    assert table.column_names == [
        "text",
        "source",
        "id",
        "rule",
        "duplicate_of_source",
        "duplicate_of_id",
        "similarity",
    ]


def test_presets_with_much_cleaning_drop_near_duplicates() -> None:
    found = {name: CorpusConfig(preset=name).dedup for name in get_args(PresetName)}
    assert found == {"web": "near", "books": "near", "encyclopaedia": "near", "chat": "exact", "none": "exact"}
    assert CorpusConfig(preset="web", dedup="exact").dedup == "exact"
