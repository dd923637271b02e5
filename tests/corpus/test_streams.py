"""Streams: every compression from other tools, damaged streams, and UTF-16."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import subprocess
import tracemalloc
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.support.records import read_file, texts_of
from textmill.config import CorpusConfig, RunConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.corpus.shards import open_corpus

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": partial(lzma.compress, preset=0),
    "zst": zstandard.ZstdCompressor().compress,
}
LINES = [f"{number} satır, 줄 {number * 7919 % 1000}" for number in range(3000)]
DATA = "".join(json.dumps({"text": line}) + "\n" for line in LINES).encode()
KINDS = pytest.mark.parametrize("kind", list(COMPRESS))


@KINDS
def test_complete_files(tmp_path: Path, kind: str) -> None:
    found = read_file(tmp_path / f"a.jsonl.{kind}", COMPRESS[kind](DATA))
    assert texts_of(found) == LINES
    assert found[-1].id == "line 3000"  # type: ignore[union-attr]


@KINDS
def test_several_members(tmp_path: Path, kind: str) -> None:
    cut = len(DATA) // 3  # in the middle of a line
    data = COMPRESS[kind](DATA[:cut]) + COMPRESS[kind](b"") + COMPRESS[kind](DATA[cut:])
    assert texts_of(read_file(tmp_path / f"a.jsonl.{kind}", data)) == LINES


@KINDS
@pytest.mark.parametrize("share", [0.2, 0.7, 0.999])
def test_records_before_the_damage_are_kept(tmp_path: Path, kind: str, share: float) -> None:
    packed = COMPRESS[kind](DATA)
    data = packed[: int(len(packed) * share)]
    *before, bad = read_file(tmp_path / f"a.jsonl.{kind}", data)
    assert isinstance(bad, BadRecord)
    assert bad.place == (f"after line {len(before)}" if before else "beginning")
    assert "damaged" in bad.reason
    assert texts_of(before) == LINES[: len(before)]
    # What the decompressor can give before the break, an oracle gives too: no whole line of it may be missing.
    assert len(before) >= _plain(kind, data).count(b"\n")


def _plain(kind: str, data: bytes) -> bytes:
    if kind == "zst":
        return zstandard.ZstdDecompressor().decompressobj().decompress(data)
    tool = {"gz": "gzip", "bz2": "bzip2", "xz": "xz"}[kind]
    if shutil.which(tool) is None:
        return b""
    return subprocess.run([tool, "-dc"], input=data, capture_output=True).stdout


@KINDS
def test_flipped_byte(tmp_path: Path, kind: str) -> None:
    packed = bytearray(COMPRESS[kind](DATA))
    packed[len(packed) // 2] ^= 0xFF
    found = read_file(tmp_path / f"a.jsonl.{kind}", bytes(packed))
    assert any(isinstance(record, BadRecord) for record in found) or kind == "zst"  # its checksum is an option


CHECKED = {**COMPRESS, "zst": zstandard.ZstdCompressor(write_checksum=True).compress, "zip": None}


@pytest.mark.parametrize("kind", list(CHECKED))
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_nothing_is_kept_of_what_a_checksum_shows_to_be_damaged(tmp_path: Path, kind: str, share: float) -> None:
    """Two files in one: the first is intact, and one bit of the second is flipped."""
    folder = tmp_path / "texts"
    folder.mkdir()
    half = DATA.index(b"\n", len(DATA) // 2) + 1
    if (compress := CHECKED[kind]) is None:
        path = folder / "a.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a.jsonl", DATA[:half])
            archive.writestr("b.jsonl", DATA[half:])
            begin = archive.getinfo("b.jsonl").header_offset + 40
            length = archive.getinfo("b.jsonl").compress_size - 10
        packed = bytearray(path.read_bytes())
    else:
        path = folder / f"a.jsonl.{kind}"
        packed = bytearray(compress(DATA[:half]) + compress(DATA[half:]))
        begin = len(compress(DATA[:half])) + 30
        length = len(packed) - begin - 30
    packed[begin + int(length * share)] ^= 4
    path.write_bytes(packed)
    (folder / "other.jsonl").write_text('{"text": "whole"}\n')
    corpus = {"sources": [str(folder)], "max_unreadable": 1.0}
    prepare(RunConfig.model_validate({"folder": str(tmp_path), "corpus": corpus, "runner": {"workers": 1}}))
    kept = [document.text for document in open_corpus(tmp_path / "corpus")]
    assert set(kept) <= {*LINES, "whole"}
    assert "whole" in kept
    # Nothing tells where a frame of zstd begins.
    assert len(kept) == 1 + (0 if kind == "zst" else DATA[:half].count(b"\n"))
    account = json.loads((tmp_path / "corpus" / "account.json").read_text())
    assert account["quarantined"] == 1


@KINDS
def test_empty_archives(tmp_path: Path, kind: str) -> None:
    assert (
        read_file(tmp_path / f"a.jsonl.{kind}", COMPRESS[kind](b"")) == read_file(tmp_path / f"b.txt.{kind}", b"") == []
    )


@KINDS
def test_wrong_extension(tmp_path: Path, kind: str) -> None:
    (bad,) = read_file(tmp_path / f"a.txt.{kind}", b"plain words " * 100)
    assert isinstance(bad, BadRecord)
    assert bad.place == "beginning"


@KINDS
def test_sections_and_files(tmp_path: Path, kind: str) -> None:
    data = "\n\n".join(LINES).encode()
    plain, packed = (
        read_file(tmp_path / name, body, section_chars=200)
        for name, body in [("a.txt", data), (f"a.txt.{kind}", COMPRESS[kind](data))]
    )
    assert texts_of(plain) == texts_of(packed)
    assert texts_of(read_file(tmp_path / f"a.md.{kind}", COMPRESS[kind](data), documents="file")) == [data.decode()]
    *before, bad = read_file(tmp_path / f"a.txt.{kind}", COMPRESS[kind](data)[:-20], section_chars=200)
    assert isinstance(bad, BadRecord)
    assert texts_of(before) == texts_of(plain)[: len(before)]


@pytest.mark.long_with("xz")
@KINDS
def test_memory_is_constant(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(
        COMPRESS[kind](
            b"".join(b'{"text": "%d ' % number + os.urandom(2500).hex().encode() + b'"}\n' for number in range(2000))
        )
    )
    (chunk,) = split_into_chunks(find_sources([str(path)]), "section")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(chunk, CorpusConfig())) == 2000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 5_000_000  # the file holds 10 MB


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.txt.gz"])
def test_utf_16(tmp_path: Path, encoding: str, name: str) -> None:
    line = {"jsonl": '{"text": "한국어 𝄞"}', "csv": "text\r\n한국어 𝄞"}.get(name.split(".")[1], "한국어 𝄞")
    data = ("\ufeff" + line).encode(encoding)
    assert texts_of(read_file(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)) == ["한국어 𝄞"]


def test_truncated_utf_16(tmp_path: Path) -> None:
    data = "\ufeffbir\niki\nüç".encode("utf-16-le")[:-1]
    *before, bad = read_file(tmp_path / "a.txt", data, documents="line")
    assert texts_of(before) == ["bir", "iki"]
    assert str(bad).startswith(f"{tmp_path / 'a.txt'}, after line 2: the stream is damaged")


def test_utf_32_and_unmarked_utf_16_are_read(tmp_path: Path) -> None:
    assert texts_of(read_file(tmp_path / "a.txt", "\ufeffkelime".encode("utf-32-le"))) == ["kelime"]
    for number, text in enumerate(("Several words of plain English text.", "짧은 한국어 문장. 다시 한국어 문장.")):
        for encoding in ("utf-16-le", "utf-16-be"):
            path = tmp_path / f"{number}{encoding}.txt"
            assert texts_of(read_file(path, (text + "\n").encode(encoding), documents="line")) == [text]


def test_older_encodings_are_suggested_and_read(tmp_path: Path) -> None:
    data = "짧은 한국어 문장\n".encode("cp949")
    (bad,) = read_file(tmp_path / "b.txt", data, documents="line")
    assert str(bad).endswith("it looks like cp949: set corpus.encoding=cp949")
    good, spoilt = read_file(tmp_path / "b.txt", data + b"\xc7\xff\n", documents="line", encoding="euc-kr")
    assert texts_of([good]) == ["짧은 한국어 문장"]
    assert isinstance(spoilt, BadRecord)


def test_the_bytes_of_an_unreadable_section_are_counted(tmp_path: Path) -> None:
    data = "Değirmenin çarkı dönüyor.\n".encode("cp1254") * 100
    (bad,) = read_file(tmp_path / "a.txt", data)
    assert isinstance(bad, BadRecord)
    assert (len(bad.raw), bad.bytes_lost) == (1000, len(data))


def test_an_older_encoding_leaves_files_in_utf_8_as_they_are(tmp_path: Path) -> None:
    text = "Değirmenin çarkı dönüyor."
    for number, stored in enumerate(("cp1254", "utf-8", "utf-8-sig", "utf-16", "ascii")):
        line = text.encode("ascii", "ignore").decode() if stored == "ascii" else text
        assert texts_of(read_file(tmp_path / f"{number}.txt", line.encode(stored), encoding="cp1254")) == [line], stored


@pytest.mark.parametrize("setting", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_leaves_files_in_utf_8_as_they_are(tmp_path: Path, setting: str) -> None:
    """Pairs of their bytes are characters of UTF-16 too, most of them Chinese."""
    text = "Değirmenin çarkı dönüyor."
    for number, stored in enumerate(("utf-8", "utf-8-sig", "utf-16", "ascii")):
        line = text.encode("ascii", "ignore").decode() if stored == "ascii" else text
        assert texts_of(read_file(tmp_path / f"{number}.txt", line.encode(stored), encoding=setting)) == [line], stored


@pytest.mark.parametrize(("text", "encoding"), [("Le café", "cp1252"), ("ğ", "cp1254")])
def test_a_last_letter_that_could_begin_a_character_of_utf_8(text: str, encoding: str, tmp_path: Path) -> None:
    """Nothing else in the file tells its encoding, so the setting does."""
    assert texts_of(read_file(tmp_path / "a.txt", text.encode(encoding), encoding=encoding)) == [text]


@pytest.mark.parametrize("name", ["letter.txt", "table.csv", "list.json", "lines.jsonl"])
def test_a_binary_file_with_the_name_of_a_text_is_no_text_in_any_encoding(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "letter.docx", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", "<w:t>Değirmenin çarkı dönüyor.</w:t>")
    (bad,) = read_file(tmp_path / name, (tmp_path / "letter.docx").read_bytes(), encoding="cp1254")
    assert isinstance(bad, BadRecord)
    assert "the file is a Word, Excel or zip file: not text" in bad.reason


def test_a_text_that_begins_like_a_binary_file_is_text(tmp_path: Path) -> None:
    for text in ("PAR1 is a receptor.", "%PDF-Dateien sind keine Texte.", "PK ist eine Abkürzung.", "BZh, Nr. 9"):
        (document,) = read_file(tmp_path / "text.txt", text.encode())
        assert isinstance(document, Document)
        assert document.text == text


def test_parquet_files_are_recognised_by_their_first_bytes(tmp_path: Path) -> None:
    for rows in ([], ["PAR1"]):
        pq.write_table(pa.table({"text": pa.array(rows, pa.string())}), tmp_path / "texts.parquet")
        (bad,) = read_file(tmp_path / "text.txt", (tmp_path / "texts.parquet").read_bytes(), encoding="cp1254")
        assert isinstance(bad, BadRecord)
        assert "a Parquet file" in bad.reason


def test_a_line_of_100_mb(tmp_path: Path) -> None:
    data = b'{"text": "short"}\n{"text": "' + b"x" * 100_000_000 + b'"}\n{"text": "last"}\n'
    found = texts_of(read_file(tmp_path / "a.jsonl", data))
    assert [len(text) for text in found] == [5, 100_000_000, 4]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_unmarked_utf_16_among_files_of_an_older_encoding(tmp_path: Path, encoding: str) -> None:
    """In cp1252 each of its bytes is a character, so that it would become `M e r i d i a n`."""
    path = tmp_path / "a.txt"
    path.write_bytes("Meridian, and more words of a plain text".encode(encoding))
    (chunk,) = split_into_chunks(find_sources([str(path)], encoding="cp1252"), "section")
    (found,) = read_records(chunk, CorpusConfig())
    assert isinstance(found, Document)
    assert found.text == "Meridian, and more words of a plain text"


@pytest.mark.parametrize("name", ["a.csv", "a.txt", "a.jsonl", "a.csv.gz"])
def test_lines_that_end_with_cr(tmp_path: Path, name: str) -> None:
    """Excel for Mac writes such CSV files."""
    lines = ['"text"', *(f'"a quoted, line {number}"' for number in range(3))]
    if name == "a.jsonl":
        lines = [f'{{"text": {line}}}' for line in lines]
    data = "".join(f"{line}\r" for line in lines).encode()
    found = texts_of(read_file(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data, documents="line"))
    assert len(found) == len(lines) - name.startswith("a.csv")
    assert "a quoted, line 2" in found[-1]


@pytest.mark.parametrize("mark", [" ", "。"])
def test_text_without_line_ends_is_cut_between_words(tmp_path: Path, mark: str) -> None:
    words = [f"{number % 97 + 1000}mill" for number in range(5000)]
    found = texts_of(read_file(tmp_path / "a.txt", (mark.join(words) + mark).encode(), section_chars=200))
    assert len(found) > 40
    assert [word for text in found for word in text.split(mark)[:-1]] == words
    assert max(map(len, found)) <= 800


def test_a_file_that_does_not_fit_its_encoding_is_quarantined(tmp_path: Path) -> None:
    """Read as cp949, a text in cp1252 has bytes that are no characters, and others that are wrong ones."""
    folder = tmp_path / "texts"
    folder.mkdir()
    korean = [f"한국어 문장 {number}" for number in range(600)]
    (folder / "korean.txt").write_bytes("\n".join(korean).encode("cp949"))
    (folder / "german.txt").write_bytes(
        "\n".join(f"Käse, Öl {number} für Übung" for number in range(30)).encode("cp1252")
    )
    (folder / "broken.txt").write_text("\n".join(f"d\ufffdj\ufffd vu {number}" for number in range(20)))
    corpus = {"sources": [str(folder)], "encoding": "cp949", "documents": "line"}
    folder = prepare(RunConfig.model_validate({"folder": str(tmp_path), "corpus": corpus, "runner": {"workers": 1}}))
    kept = {document.text for document in open_corpus(folder)}
    assert kept == {*korean, *(f"d\ufffdj\ufffd vu {number}" for number in range(20))}
    account = json.loads((folder / "account.json").read_text())
    assert account["garbled"] == 20
    (bad,) = map(json.loads, (folder / "quarantine.jsonl").read_text().splitlines())
    assert "not in corpus.encoding=cp949" in bad["reason"]
