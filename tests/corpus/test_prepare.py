"""The command prepare: the account balances, only the content decides the bytes, and a kill loses nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.prepare_job import run_prepare
from textmill.config import RunConfig
from textmill.corpus import find_sources, records
from textmill.corpus import prepare as prepare_module
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

LINES = [
    {"text": "bir metin"},
    {"text": "bir  metin\n"},
    {"text": ""},
    {"text": "x"},
    {"body": "no text"},
    {"text": "한국어 문장"},
]


@pytest.fixture
def workspace(tmp_path: Path, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three texts and a file of lines with every possible outcome of a record."""
    (tiny_texts / "lines.jsonl").write_bytes("\n".join(json.dumps(line) for line in LINES).encode() + b"\n\xff\xff\n\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(folder: str = "out", workers: int = 1, words: list[str] | None = None, **corpus: Any) -> RunConfig:
    settings = {
        "sources": words or ["texts"],
        "section_chars": 100,
        "split": [8.0, 1.0, 1.0],
        "max_unreadable": 0.5,
        **corpus,
    }
    return RunConfig.model_validate({"folder": folder, "corpus": settings, "runner": {"workers": workers}})


def file_contents(folder: Path) -> dict[str, bytes]:
    """Every file except those that record settings and paths."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "run.yaml"}


def documents(folder: Path) -> dict[str, list[Document]]:
    return {split: list(open_corpus(folder, split)) for split in SPLITS}


def test_account(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(config_of(min_chars=2))
    account = json.loads((folder / "account.json").read_text())
    lines = account["by_source"]["texts/lines.jsonl"]
    assert lines.pop("changed") == {"spaces": 1}
    assert lines.pop("quarantined_bytes") == len('{"body": "no text"}\n') + len(b"\xff\xff\n")
    assert lines == {
        "files": 1,
        "records": 8,
        "kept": 2,
        "dropped": {"duplicate": 1, "empty": 2, "short": 1},
        "quarantined": 2,
        "garbled": 0,
    }
    assert account["records"] == account["kept"] + sum(account["dropped"].values()) + account["quarantined"]
    found = documents(folder)
    for split in SPLITS:
        amounts = account["by_split"][split]
        assert amounts["documents"] == len(found[split]) > 0
        assert amounts["bytes"] == sum(len(row.text.encode()) for row in found[split])
        assert amounts["characters"] == sum(len(row.text) for row in found[split])
    assert sum(map(len, found.values())) == account["kept"]
    printed = capsys.readouterr()
    assert "quarantined              2  23 bytes; see out/corpus/quarantine.jsonl" in printed.out
    assert "the first: texts/lines.jsonl, line 5: no field 'text'; found ['body']" in printed.out
    assert "duplicate" in printed.out
    assert "prepare: read and clean: " in printed.err


def test_quarantine_and_origins(workspace: Path) -> None:
    folder = prepare(config_of())
    rows = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "file": "texts/lines.jsonl",
            "place": "line 5",
            "reason": "no field 'text'; found ['body']; set corpus.text_key=body",
            "raw": '{"body": "no text"}\n',
        },
        {
            "file": "texts/lines.jsonl",
            "place": "line 7",
            "raw": "\\xff\\xff\n",
            "reason": "not UTF-8: byte 0xff at 0; if the file has another encoding, name it with corpus.encoding",
        },
    ]
    everything = [row for split in documents(folder).values() for row in split]
    assert {(row.text, row.id) for row in everything if row.source == "texts/lines.jsonl"} == {
        ("bir metin", "line 1"),
        ("x", "line 4"),
        ("한국어 문장", "line 6"),
    }
    assert {row.source for row in everything} == {
        f"texts/{name}" for name in ("english.txt", "korean.txt", "turkish.txt", "lines.jsonl")
    }


def test_workers_order_and_chunks_do_not_matter(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = file_contents(prepare(config_of("one")))
    assert file_contents(prepare(config_of("two", workers=2))) == one
    shuffled = ["texts/turkish.txt", "texts/*.jsonl", "texts/korean.txt", "./texts/english.txt"]
    assert file_contents(prepare(config_of("shuffled", words=shuffled))) == one
    expected = documents(workspace / "one" / "corpus")
    monkeypatch.setattr(records, "CHUNK_BYTES", 40)
    assert documents(prepare(config_of("chunks"))) == expected


def test_done_already(workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = prepare(config_of())
    count = json.loads((folder / "account.json").read_text())["kept"]
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "hash_file", lambda path: pytest.fail(f"{path} was read again"))
        assert prepare(config_of(workers=2, max_unreadable=0.4)) == folder
    assert capsys.readouterr().out == f"prepare: done already: out/corpus ({count} documents)\n"
    os.utime("texts/english.txt", ns=(1, 1))
    prepare(config_of())
    assert "done already" in capsys.readouterr().out


def test_done_already_from_another_folder(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(config_of())
    monkeypatch.chdir(workspace / "texts")
    prepare(config_of("../out", words=["."]))
    assert "done already" in capsys.readouterr().out


def test_corpus_older_than_a_setting_counts_as_its_default(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prepare(config_of()) / "manifest.json"
    manifest = json.loads(path.read_text())
    was = manifest["made_from"].pop("corpus.min_chars")
    path.write_text(json.dumps(manifest))
    prepare(config_of())
    assert "done already" in capsys.readouterr().out
    with pytest.raises(TextmillError, match=rf"corpus.min_chars was {was}, is {was + 1};"):
        prepare(config_of(min_chars=was + 1))


def test_change_is_refused_until_forced(workspace: Path) -> None:
    before = file_contents(prepare(config_of()))
    with pytest.raises(TextmillError, match=r"corpus.section_chars was 100, is 200.*--force"):
        prepare(config_of(section_chars=200))
    english = Path("texts/english.txt")
    text = english.read_text()
    english.write_text(text.replace("mill", "MILL", 1))  # the same length
    with pytest.raises(TextmillError, match=r"inputs: the source english.txt has changed; set"):
        prepare(config_of())
    english.write_text(text)
    assert file_contents(Path("out/corpus")) == before
    assert len(documents(prepare(config_of(section_chars=200), "yes"))["train"]) < 100
    after = file_contents(prepare(config_of(), "changed"))
    shards = [name for name in before if name.endswith(".parquet")]
    assert [after[name] for name in shards] == [before[name] for name in shards]


def test_documents_never_move_when_sources_grow(workspace: Path) -> None:
    before = documents(prepare(config_of("before", words=["texts/korean.txt"])))
    with open("texts/korean.txt", "a", encoding="utf-8") as stream:
        stream.write("\n\n새로운 글이 덧붙었다.\n" * 50)
    after = documents(prepare(config_of("after")))
    last = max((row for rows in before.values() for row in rows), key=lambda row: int(row.id.split()[1]))
    for split, rows in before.items():
        assert {row.text for row in rows} - {last.text} <= {row.text for row in after[split]}


def test_too_many_bad_records(workspace: Path) -> None:
    with pytest.raises(TextmillError) as caught:
        prepare(config_of(max_unreadable=0.001))
    assert "texts/lines.jsonl:5: no field 'text'; found ['body']; set corpus.text_key=body" in str(caught.value)
    assert "; all of them are in out/corpus.part/quarantine.jsonl; fix" in str(caught.value)
    assert "raise corpus.max_unreadable" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path("out/corpus").exists()
    assert len(Path("out/corpus.part/quarantine.jsonl").read_text().splitlines()) == 2
    resumed = file_contents(prepare(config_of(max_unreadable=0.5)))
    assert resumed == file_contents(prepare(config_of("fresh")))


def test_no_document_kept(workspace: Path) -> None:
    with pytest.raises(TextmillError, match=r"none of \d+ records was kept .*corpus.min_chars=100000"):
        prepare(config_of(min_chars=100_000))
    assert not Path("out/corpus").exists()


def test_without_dedup(workspace: Path) -> None:
    folder = prepare(config_of(dedup="none"))
    assert "duplicate" not in json.loads((folder / "account.json").read_text())["dropped"]


def test_empty_split_is_reported(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(config_of(words=["texts/lines.jsonl"], split=[1.0, 0.0, 1e-9]))
    printed = capsys.readouterr().out
    assert "test is empty: too few documents (3) for a ratio of 0.0%; " in printed
    assert "corpus.documents=block" in printed
    assert "valid is empty" not in printed


def test_own_output_is_not_a_source(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(config_of("texts"))
    prepare(config_of("texts"))
    assert "done already" in capsys.readouterr().out


def test_file_that_changes_while_it_is_read(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare_module._run

    def change_then_run(*arguments: Any) -> Any:
        with open("texts/english.txt", "a") as stream:
            stream.write("more")
        return run(*arguments)

    monkeypatch.setattr(prepare_module, "_run", change_then_run)
    with pytest.raises(TextmillError, match=r"texts/english\.txt: changed while it was read"):
        prepare(config_of())


def test_full_disk_is_reported_and_resumed_from(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_sources, "FILE_BYTES", records.CHUNK_BYTES)  # a chunk for each file
    expected = file_contents(prepare(config_of("whole")))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", FailAfter(12))
        with pytest.raises(TextmillError, match="No space left on device; fix that and run the command again"):
            prepare(config_of())
    assert file_contents(prepare(config_of())) == expected


class FailAfter:
    """os.fsync that reports a full disk after some calls."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, handle: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


class Crash(BaseException):
    """Raised to simulate the end of the process."""


def test_crash_at_every_file(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before the k-th file is written, for every k, leave unfinished files, and run again."""
    words = ["texts/korean.txt", "texts/lines.jsonl"]
    expected, replace, point = file_contents(prepare(config_of("whole", words=words))), os.replace, 0
    while True:
        point += 1
        left = [point]

        def crash_later(old: Any, new: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise Crash
            replace(old, new)

        folder = f"run-{point}"
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", crash_later)
            try:
                prepare(config_of(folder, words=words))
            except Crash:
                (Path(folder) / "corpus.part" / "train-00000.parquet.tmp-99").write_bytes(b"half")
            else:
                break
        assert not Path(folder, "corpus").exists()
        assert file_contents(prepare(config_of(folder, words=words))) == expected, f"crash point {point}"
    assert point > 15


def test_killed_and_run_again(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_sources, "FILE_BYTES", records.CHUNK_BYTES)  # a chunk for each file, as in the job
    rng = random.Random(5)
    os.mkdir("big")
    for number in range(6):
        rows = (
            json.dumps({"text": f"{number} {row} " + "söz " * rng.randrange(200)}, ensure_ascii=False)
            for row in range(300)
        )
        Path(f"big/{number}.jsonl").write_text("\n".join(rows), encoding="utf-8")

    def config(folder: str) -> RunConfig:
        corpus = {"sources": ["big"], "section_chars": 200}
        return RunConfig.model_validate({"folder": folder, "corpus": corpus, "runner": {"workers": 2}})

    expected = file_contents(prepare(config("whole")))
    for stage in ("read", "written"):
        assert run_prepare(config("killed"), f"killed/corpus.part/work/*.{stage}.json", 3) == -signal.SIGKILL
    assert run_prepare(config("killed")) == 0
    assert file_contents(Path("killed/corpus")) == expected
    assert not Path("killed/corpus.part").exists()


def test_killed_while_intermediate_files_are_removed(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed when half of the intermediate files are deleted: the next run must not take the rest for finished work."""
    expected = prepare(config_of("whole"))
    real, gone = Path.unlink, []

    def cut(path: Path, missing_ok: bool = False) -> None:
        if ".old-" in str(path.parent):
            if gone:
                raise KeyboardInterrupt
            gone.append(path)
        real(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", cut)
    with pytest.raises(KeyboardInterrupt):
        prepare(config_of("cut"))
    monkeypatch.setattr(Path, "unlink", real)
    left = list(gone[0].parent.iterdir())
    assert left, "one file is gone and others are not"
    assert file_contents(prepare(config_of("cut"))) == file_contents(expected)
