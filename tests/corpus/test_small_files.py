"""Many small files: the same documents as one file, in a few shards, with their own file in the lineage."""

from __future__ import annotations

import json
import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from textmill.cli import main
from textmill.config import RunConfig
from textmill.corpus import find_sources
from textmill.corpus.document import SPLITS
from textmill.corpus.dropped import read_dropped
from textmill.corpus.prepare import name_entries, prepare
from textmill.corpus.shards import open_corpus

COUNT = 300
TEXTS = [f"{number} " + "mill " * (number % 7 + 1) for number in range(COUNT - 1)] + ["short"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files in twelve folders; more than can have an entry each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("textmill.corpus.prepare.MAX_ENTRIES", 20)
    for number, text in enumerate(TEXTS):
        path = Path(f"texts/{number % 12}/{number:03d}.txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    Path("texts/3/empty.txt").touch()
    Path("texts/3/bad.txt").write_bytes(b"\xff\xfe\xfd bad")
    return tmp_path


def config_of(folder: str, sources: str, **corpus: Any) -> RunConfig:
    settings = {"sources": [sources], "split": [8.0, 1.0, 1.0], **corpus}
    return RunConfig.model_validate({"folder": folder, "corpus": settings, "runner": {"workers": 1}})


def origins(folder: Path) -> dict[tuple[str, str, str], str]:
    found = {}
    for split in SPLITS:
        found.update({(split, row.source, row.id): row.text for row in open_corpus(folder, split)})
    return found


def test_many_files_make_few_shards_entries_and_tasks(small: Path) -> None:
    folder = prepare(config_of("out", "texts", keep_dropped=True))
    assert len(list(folder.glob("*.parquet"))) == 4, "a shard for each split, and the dropped documents"
    account = json.loads((folder / "account.json").read_text())
    assert set(account["by_source"]) == {f"texts/{number}/*" for number in range(12)}
    assert account["files"] == COUNT + 2
    assert account["records"] == sum(one["records"] for one in account["by_source"].values()) == COUNT + 1
    assert account["quarantined"] == account["by_source"]["texts/3/*"]["quarantined"] == 1
    assert json.loads((folder / "quarantine.jsonl").read_text())["file"] == "texts/3/bad.txt"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sum(name.startswith("inputs.") for name in manifest["made_from"]) == len(manifest["mtimes"]) == 12
    found = origins(folder)
    assert {(source, text) for (_, source, _), text in found.items()} == {
        (f"texts/{number % 12}/{number:03d}.txt", text.rstrip()) for number, text in enumerate(TEXTS)
    }


def test_dropped_documents_name_their_file(small: Path) -> None:
    Path("texts/5/zzz.txt").write_text(TEXTS[3])
    folder = prepare(config_of("out", "texts", keep_dropped=True, min_chars=8))
    rows = {row["source"]: row for row in read_dropped(folder)}
    assert rows["texts/5/zzz.txt"]["duplicate_of_source"] == "texts/3/003.txt"
    assert rows[f"texts/{(COUNT - 1) % 12}/{COUNT - 1}.txt"]["rule"] == "short"


def test_a_change_in_a_folder_is_noticed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(config_of("out", "texts"))
    capsys.readouterr()
    prepare(config_of("out", "texts"))
    assert "done already" in capsys.readouterr().out
    os.utime("texts/3/003.txt", ns=(5, 5))
    prepare(config_of("out", "texts"))
    assert "done already" in capsys.readouterr().out, "only its time is new"
    Path("texts/3/003.txt").write_text("other")
    assert main(["prepare", "x.yaml"]) == 2
    Path("x.yaml").write_text("folder: out\ncorpus: {sources: [texts], split: [8, 1, 1]}\n")
    capsys.readouterr()
    assert main(["prepare", "x.yaml"]) == 2
    assert "the source 3/* has changed" in capsys.readouterr().err
    Path("texts/3/new.txt").write_text("more")
    assert main(["prepare", "x.yaml"]) == 2
    assert "the source 3/* has changed (28 files, 27 before)" in capsys.readouterr().err


def test_archives_give_the_same_documents(small: Path) -> None:
    """In a tar the files stand in another order than their names, and are read in it."""
    names = sorted(path for path in Path("texts").rglob("*.txt") if path.name != "bad.txt")
    with zipfile.ZipFile("all.zip", "w") as archive:
        for path in names:
            archive.write(path)
    with tarfile.open("all.tar.gz", "w:gz") as tar:
        for path in reversed(names):
            tar.add(path)
    expected = {(split, source) for split, source, _ in origins(prepare(config_of("out", "texts")))}
    for name in ("all.zip", "all.tar.gz"):
        folder = prepare(config_of(name + ".out", name))
        found = origins(folder)
        assert {(split, source.removeprefix(f"{name}/")) for split, source, _ in found} == expected
        assert len(list(folder.glob("*.parquet"))) == 3
    read = [source for split, source, _ in found if split == "train"]
    assert read == sorted(read, key=lambda source: names.index(Path(source.removeprefix("all.tar.gz/"))), reverse=True)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"{number}.txt" for number in range(9)], ["*"] * 9),
        ([f"a/b/{number}/x.txt" for number in range(9)], ["a/b/*"] * 9),
        (["a/1.txt", "a/b/2.txt", "c.txt", "d/e/f.txt"], ["a/*", "a/*", "*", "d/*"]),
        (["a/1.txt", "b.txt"], ["a/1.txt", "b.txt"]),
    ],
)
def test_entries(monkeypatch: pytest.MonkeyPatch, names: list[str], expected: list[str]) -> None:
    monkeypatch.setattr("textmill.corpus.prepare.MAX_ENTRIES", 3)
    assert name_entries(names) == expected


def test_a_file_is_looked_up_a_few_times_only(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of a small file is that of its system calls; a path per file and step made it a hundred times more."""
    real, calls = os.path.realpath, []

    def count(path: str) -> str:
        calls.append(path)
        return real(path)

    monkeypatch.setattr(os.path, "realpath", count)
    find_sources._real_folder.cache_clear()
    assert len(find_sources.find_sources(["texts"])) == COUNT + 2
    assert len(calls) < 60
