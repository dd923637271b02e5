"""corpus.split_by: no text of valid and test is surrounded by text of train."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from textmill.config import RunConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.dropped import read_dropped
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError


def prepared(folder: Path, *sources: Any, **corpus: Any) -> dict[tuple[str, str], str]:
    """The split of each document, by its file and place."""
    settings = {"folder": str(folder / "corpus"), "sources": list(sources), "split": [8, 1, 1], **corpus}
    made = prepare(RunConfig.model_validate({"corpus": settings, "runner": {"workers": 1}}))
    return {(Path(row.source).name, row.id): split for split in SPLITS for row in open_corpus(made, split)}


IN_ORDER = ["train", "valid", "test", "train"]
"""The splits of a long text from its beginning to its end."""


def test_the_middle_of_a_book_is_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = prepared(tmp_path, "tinyshakespeare", section_chars=1000, split_by="position", keep_dropped=True)
    splits = [found[name] for name in sorted(found, key=lambda name: int(name[1].split()[1]))]
    assert [split for split, _ in groupby(splits)] == IN_ORDER
    sizes = [splits.count(split) / len(splits) for split in SPLITS]
    assert sizes == pytest.approx([0.8, 0.1, 0.1], abs=0.02)
    gap = [row["id"] for row in read_dropped(tmp_path / "corpus", "gap")]
    numbers = [int(place.split()[1]) for place in gap]
    held_out = [int(place.split()[1]) for (_, place), split in found.items() if split != "train"]
    near = range(min(numbers), max(numbers) + 1)
    assert sorted([*numbers, *held_out]) == list(near), "the gaps are on both sides of what is held out"
    assert {near[0], near[-1]} <= set(numbers)
    assert f"dropped {len(gap):>18}  gap {len(gap)}" in capsys.readouterr().out
    prepared(tmp_path / "hash", "tinyshakespeare", section_chars=1000)
    assert "set corpus.split_by=position" in capsys.readouterr().out


def test_lines_of_a_record_and_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a file is several chunks."""
    monkeypatch.setattr("textmill.corpus.records.CHUNK_BYTES", 900)
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    found = prepared(tmp_path, str(tmp_path / "lines.txt"), documents="line", split_by="position")
    splits = [
        found["lines.txt", f"line {number}"] for number in range(1, 1001) if ("lines.txt", f"line {number}") in found
    ]
    assert [split for split, _ in groupby(splits)] == IN_ORDER
    records = [{"text": "\n\n".join(f"{book} {line} " + "word " * 30 for line in range(100))} for book in range(3)]
    (tmp_path / "books.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = prepared(
        tmp_path / "books", str(tmp_path / "books.jsonl"), cut_records=True, section_chars=100, split_by="position"
    )
    for book in range(1, 4):
        part = [split for (_, place), split in found.items() if place.startswith(f"line {book},")]
        assert set(part) == set(SPLITS)
        assert part.count("train") > 70


@pytest.mark.parametrize("end", ["tex", "py", "html"])
def test_the_middle_of_a_document_that_is_one_text_is_held_out(tmp_path: Path, end: str) -> None:
    """Its sections are parts of one record, as those of a plain text file are."""
    parts = [f"Paragraph {number}. " + "A wheel turns in the mill by the river. " * 5 for number in range(100)]
    frames = {
        "tex": "\\documentclass{article}\n\\begin{document}\n%s\n\\end{document}\n",
        "html": "<!DOCTYPE html><html><body><article>%s</article></body></html>",
    }
    joined = "".join(f"<p>{part}</p>" for part in parts) if end == "html" else "\n\n".join(parts)
    (tmp_path / f"a.{end}").write_text(frames.get(end, "%s") % joined, encoding="utf-8")
    found = prepared(tmp_path, str(tmp_path / f"a.{end}"), section_chars=200, split_by="position")
    splits = [found[name] for name in sorted(found, key=lambda name: int(name[1].split()[1]))]
    assert [split for split, _ in groupby(splits)] == IN_ORDER
    assert splits.count("train") > 70


def test_files_and_values_stay_together(tmp_path: Path) -> None:
    for number in range(60):
        path = tmp_path / "texts" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n\n".join(f"{number} {line} " + "word " * 20 for line in range(9)))
    found = prepared(tmp_path, str(tmp_path / "texts"), section_chars=100, split_by="file")
    by_file: dict[str, set[str]] = {}
    for (name, _), split in found.items():
        by_file.setdefault(name, set()).add(split)
    assert len(by_file) == 60
    assert all(len(splits) == 1 for splits in by_file.values())
    assert set.union(*by_file.values()) == set(SPLITS)
    rows = [{"text": f"text {number}", "author": f"author {number % 40}"} for number in range(400)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"keep_fields": ["author"], "split_by": "field:author"}
    found = prepared(tmp_path / "rows", str(tmp_path / "rows.jsonl"), **settings)
    by_author: dict[int, set[str]] = {}
    for (_, place), split in found.items():
        by_author.setdefault((int(place.split()[1]) - 1) % 40, set()).add(split)
    assert len(by_author) == 40
    assert all(len(splits) == 1 for splits in by_author.values())
    assert set.union(*by_author.values()) == set(SPLITS)


def test_sources_stay_together(tmp_path: Path) -> None:
    """Each has two files; a source without a name is a file of its own."""
    entries: list[Any] = []
    for number in range(30):
        for part in range(2):
            lines = "".join(f"site {number} line {line} of {part}\n" for line in range(5))
            (tmp_path / f"{number}-{part}.txt").write_text(lines)
        entries.append({"name": f"site{number}", "path": str(tmp_path / f"{number}-*.txt")})
    (tmp_path / "rest.txt").write_text("".join(f"another line {line}\n" for line in range(5)))
    found = prepared(tmp_path, *entries, str(tmp_path / "rest.txt"), documents="line", split_by="source")
    by_source: dict[str, set[str]] = {}
    for (name, _), split in found.items():
        by_source.setdefault(name.partition("-")[0], set()).add(split)
    assert len(by_source) == 31
    assert all(len(splits) == 1 for splits in by_source.values())
    assert set.union(*by_source.values()) == set(SPLITS)


def test_few_files_leave_no_split_empty(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(5):
        path = tmp_path / "texts" / f"{number}.txt"
        path.write_text("\n\n".join(f"{number} {line} " + "word " * 20 for line in range(9)))
        found = prepared(tmp_path / f"of {number}", str(tmp_path / "texts"), section_chars=100, split_by="file")
        assert len(set(found.values())) == min(3, number + 1)
    kept = prepared(tmp_path / "train", str(tmp_path / "texts"), section_chars=100, split_by="file", split=[1, 0, 0])
    assert set(kept.values()) == {"train"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("field:author", "add it to corpus.keep_fields"),
        ("author", "give document, file, source, position or field:NAME"),
        ("source", "entries of corpus.sources with names"),
    ],
)
def test_mistakes(setting: str, message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        RunConfig.model_validate({"corpus": {"split_by": setting}})
