"""Finding sources: files, globs, folders, bundled corpora, and the errors when nothing is found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from textmill.corpus import records
from textmill.corpus.find_sources import describe_skipped, find_sources, portable_names, split_into_chunks
from textmill.errors import TextmillError


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [
        "a.txt",
        "b.jsonl",
        "notes.md",
        "table.bin",
        ".hidden.txt",
        "deep/c.TXT",
        "deep/er/d.ndjson",
        "deep/.git/e.txt",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(words: list[str], skip: list[Path] | None = None) -> list[str]:
    return [source.name for source in find_sources(words, skip or [])]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.txt"], ["a.txt"]),
        (["*.txt"], ["a.txt"]),
        (["**/*.ndjson"], ["deep/er/d.ndjson"]),
        (["."], ["a.txt", "b.jsonl", "deep/c.TXT", "deep/er/d.ndjson", "notes.md"]),
        (["deep", "a.txt"], ["a.txt", "deep/c.TXT", "deep/er/d.ndjson"]),
        (["./a.txt", "a.txt", "*.txt", "deep/../a.txt"], ["a.txt"]),
        (["tinyshakespeare", "a.txt"], ["a.txt", "tinyshakespeare"]),
    ],
)
def test_found(tree: Path, words: list[str], expected: list[str]) -> None:
    assert names(words) == expected
    assert names(words[::-1]) == expected


def test_symlink_is_its_target(tree: Path) -> None:
    os.symlink("a.txt", "z.txt")
    assert names(["z.txt", "a.txt"]) == ["a.txt"]


def test_brackets_in_a_name(tree: Path) -> None:
    (tree / "a[1].txt").write_text("x")
    assert names(["a[1].txt"]) == ["a[1].txt"]


def test_own_folders_are_not_sources(tree: Path) -> None:
    assert names(["."], [tree / "deep"]) == ["a.txt", "b.jsonl", "notes.md"]
    assert names(["**/*.txt"], [tree / "deep"]) == ["a.txt"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"corpus.sources is empty; .*\.jsonl.*tinyshakespeare"),
        (
            ["gone.txt"],
            "corpus.sources: no file, folder or corpus 'gone.txt'; check the path; the bundled corpora: tiny",
        ),
        (["/no/such.txt"], r"check the path \(in a YAML file, paths are relative to that file\); the bundled"),
        (["/no/such/*.txt"], r"subfolders\) \(in a YAML file, paths are relative to that file\)"),
        (["tinyshakespear"], "did you mean 'tinyshakespeare'"),
        (["*.nothing"], r"nothing matches '\*.nothing'"),
        (["table.bin"], r"table.bin: cannot read '.bin'; textmill reads .txt, .text, .md, .tokens, .jsonl, .ndjson"),
        (["*.*"], r"table.bin: cannot read '.bin'"),
        (["deep/.git/.."], None),
        (["empty"], "no file to read in 'empty'; textmill reads .txt"),
    ],
)
def test_not_found(tree: Path, words: list[str], message: str | None) -> None:
    (tree / "empty").mkdir()
    if message is None:
        assert names(words) == ["deep/c.TXT", "deep/er/d.ndjson"]
        return
    with pytest.raises(TextmillError, match=message):
        find_sources(words)


def test_messages_name_where_the_entries_are_given(tree: Path) -> None:
    for entry in ("/no/such.txt", "/no/such/*.txt", "*.nothing"):
        with pytest.raises(TextmillError, match=r"^--text: ") as raised:
            find_sources([entry], setting="--text")
        assert "YAML" not in str(raised.value), "a path of the command line is relative to the current folder"


def test_names_do_not_depend_on_the_project_folder(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = portable_names(find_sources(["deep", "a.txt", "tinyshakespeare"]))
    monkeypatch.chdir(tree / "deep")
    assert sorted(here) == sorted(portable_names(find_sources([str(tree / "deep"), "../a.txt", "tinyshakespeare"])))
    assert sorted(here) == ["a.txt", "deep/c.TXT", "deep/er/d.ndjson", "tinyshakespeare"]


@pytest.mark.parametrize("end", [b"\n", b""])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 10, 64, 10_000])
def test_chunks_are_complete_lines(tree: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, end: bytes) -> None:
    lines = [b"%d" % number * (number % 5) for number in range(60)]
    (tree / "b.jsonl").write_bytes(b"\n".join(lines) + end)
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(records, "READ_BYTES", 3)
    data, stop = (tree / "b.jsonl").read_bytes(), 0
    chunks = split_into_chunks(find_sources(["b.jsonl"]), "section")
    for chunk in chunks:
        assert chunk.start == stop
        assert chunk.first_record == 1 + data[: chunk.start].count(b"\n")
        assert chunk.start == 0 or data[chunk.start - 1 : chunk.start] == b"\n"
        stop = chunk.stop
    assert stop == len(data)
    assert (len(chunks) == 1) == (chunk_bytes > len(data))


def test_text_is_split_only_if_a_line_is_a_document(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", 4)
    (tree / "a.txt").write_text("1\n" * 20)
    assert len(split_into_chunks(find_sources(["a.txt"]), "section")) == 1
    assert (
        len(split_into_chunks(find_sources(["a.txt"]), "line")) == 7
    )  # a cut at a line's end after 4 bytes takes one more line


def test_folders_behind_links_are_read_once(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "more.txt").write_text("x\n")
    (elsewhere / "back").symlink_to(tree)  # a loop
    for name in ("linked", "again"):
        (tree / name).symlink_to(elsewhere)
    (tree / "a-link").symlink_to(tree / "deep")  # what it leads to keeps its name
    expected = ["a.txt", "again/more.txt", "b.jsonl", "deep/c.TXT", "deep/er/d.ndjson", "notes.md"]
    assert names(["."]) == expected
    back = ["a.txt", "b.jsonl", "deep/c.TXT", "deep/er/d.ndjson", "notes.md"]
    assert names(["linked"]) == [*(f"linked/back/{name}" for name in back), "linked/more.txt"]


@pytest.mark.parametrize("entry", [".", "*.txt"])
def test_a_link_to_nothing_is_one_skipped_file(tree: Path, entry: str) -> None:
    (tree / "gone.txt").symlink_to(tree / "removed.txt")
    skipped: list[str] = []
    assert "a.txt" in [source.name for source in find_sources([entry], skipped=skipped)]
    assert "1 file has a link to nothing and will be skipped: gone.txt" in describe_skipped(skipped)
