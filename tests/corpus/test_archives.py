"""Files that cannot be read are named, archives are read, and what follows the data of a file costs no record."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest

from textmill.config import CorpusConfig, RunConfig
from textmill.corpus import archives
from textmill.corpus.archives import read_small_member
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, portable_names, read_records, split_into_chunks
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

INNER = {
    "a.jsonl": b'{"text": "first words"}\n{"text": "second words"}\n',
    "deep/b.txt.gz": gzip.compress(b"third words"),
    "deep/notes.key": b"PK",
    "deep/.hidden.txt": b"hidden",
}


def write_archive(path: Path) -> None:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in INNER.items():
                archive.writestr(name, data)
        return
    with tarfile.open(path, "w:gz" if path.suffix in (".gz", ".tgz") else "w") as archive:
        for name, data in INNER.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


def config_of(folder: Path) -> RunConfig:
    corpus = {"sources": [str(folder / "texts")], "folder": str(folder / "corpus")}
    return RunConfig.model_validate({"corpus": corpus, "runner": {"workers": 1}})


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tgz"])
def test_archives_are_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "texts").mkdir()
    write_archive(tmp_path / "texts" / name)
    folder = prepare(config_of(tmp_path))
    found = {document.text: Path(document.source).relative_to(tmp_path).as_posix() for document in open_corpus(folder)}
    assert found == {
        "first words": f"texts/{name}/a.jsonl",
        "second words": f"texts/{name}/a.jsonl",
        "third words": f"texts/{name}/deep/b.txt.gz",
    }
    account = json.loads((folder / "account.json").read_text(encoding="utf-8"))
    unread = [str(tmp_path / "texts" / name / "deep" / "notes.key")]
    assert account["skipped_files"] == {"no format that textmill reads": unread}


def test_a_changed_archive_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts").mkdir()
    write_archive(tmp_path / "texts" / "a.zip")
    sources = find_sources([str(tmp_path / "texts")])
    monkeypatch.chdir(tmp_path / "texts")
    assert portable_names(find_sources(["a.zip"])) == portable_names(sources)
    prepare(config_of(tmp_path))
    monkeypatch.setitem(INNER, "a.jsonl", b'{"text": "other words"}\n{"text": "second words"}\n')
    write_archive(tmp_path / "texts" / "a.zip")
    with pytest.raises(TextmillError, match="made from other settings or inputs"):
        prepare(config_of(tmp_path))


def test_damaged_archives_are_named(tmp_path: Path) -> None:
    for name in ("a.zip", "a.tar.gz"):
        (tmp_path / name).write_bytes(b"no archive")
        with pytest.raises(TextmillError, match=f"{name}: not a readable archive"):
            find_sources([str(tmp_path / name)])


def test_an_archive_with_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    """A flipped bit of a compressed archive may leave its file headers as they were."""
    path = tmp_path / "a.tar.gz"
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        text = tarfile.TarInfo("a.txt")
        text.size = 1000
        archive.addfile(text, io.BytesIO(b"garbled".ljust(1000)))
    path.write_bytes(
        gzip.compress(content.getvalue())[:-8] + zlib.crc32(b"other").to_bytes(4, "little") + b"\0\x28\0\0"
    )
    with pytest.raises(TextmillError, match=r"a\.tar\.gz: not a readable archive"):
        find_sources([str(path)])


def test_small_files_of_a_zip_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not plain and whole is left to zipfile, which names what is wrong with it."""
    members = {"stored": zipfile.ZIP_STORED, "deflated": zipfile.ZIP_DEFLATED, "other": zipfile.ZIP_BZIP2}
    members |= {"damaged": zipfile.ZIP_STORED, f"{'long/' * 1000}name": zipfile.ZIP_STORED}
    content = b"water drives the wheel " * 9
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for name, method in members.items():
            archive.writestr(name, content + name.encode(), method)
    data = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(data.replace(b"wheel damaged", b"wheel Damaged", 1))

    def read(name: str, size: int = 6000) -> bytes | None:
        with zipfile.ZipFile(tmp_path / "a.zip") as archive:
            position = archive.getinfo(name).header_offset + 1
        with monkeypatch.context() as patch:
            patch.setattr(archives.zipfile, "ZipFile", None)  # the directory is not read
            return read_small_member(f"zip://{name}::{tmp_path / 'a.zip'}", position, size)

    for name in ("stored", "deflated", f"{'long/' * 1000}name"):
        assert read(name) == content + name.encode()
    assert [read(name) for name in ("other", "damaged")] == [None] * 2
    assert read("stored", len(content)) is None


def test_a_zip_that_was_streamed(tmp_path: Path) -> None:
    """Its sizes and checksums are only in its directory; and a later file of the same name replaces an earlier one."""

    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = b""

        def writable(self) -> bool:
            return True

        def write(self, block: Any) -> int:
            self.data += bytes(block)
            return len(block)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, text in (("a.txt", "old words"), ("b.txt", "other words"), ("a.txt", "new words")):
            archive.writestr(name, text)
    (tmp_path / "a.zip").write_bytes(pipe.data)
    sources = find_sources([str(tmp_path / "a.zip")])
    texts = [read_small_member(source.address, source.position, 1000) for source in sources]
    assert texts == [b"new words", b"other words"]


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("a.txt", "b.key", "c.mp3", "README"):
        (tmp_path / "texts" / name).write_text("some words", encoding="utf-8")
    prepare(config_of(tmp_path))
    assert "3 files have no format that textmill reads and will be skipped: " in (printed := capsys.readouterr().out)
    assert all(name in printed for name in ("README", "b.key", "c.mp3"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.txt.gz", "a.csv.gz", "a.json.gz"])
def test_what_follows_gzip_data_costs_no_record(tmp_path: Path, name: str) -> None:
    text = {
        "a.jsonl.gz": '{"text": "first"}\n{"text": "last"}',
        "a.txt.gz": "first\nlast",
        "a.csv.gz": "text\nfirst\nlast",
        "a.json.gz": '[{"text": "first"}, {"text": "last"}]',
    }[name]
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) + b"garbage")
    config = CorpusConfig(documents="line")
    (chunk,) = split_into_chunks(find_sources([str(tmp_path / name)]), "line")
    *before, bad = read_records(chunk, config)
    assert [record.text for record in before if isinstance(record, Document)] == ["first", "last"]
    assert isinstance(bad, BadRecord)
    assert "follow the data" in bad.reason


def test_other_xml_is_reported(tmp_path: Path) -> None:
    (tmp_path / "feed.xml").write_text("<rss><channel><item>words</item></channel></rss>", encoding="utf-8")
    (chunk,) = split_into_chunks(find_sources([str(tmp_path / "feed.xml")]), "section")
    (bad,) = read_records(chunk, CorpusConfig())
    assert "not a MediaWiki dump: its first element is <rss>" in str(bad)
