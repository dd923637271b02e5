"""Records: each text format, each kind of bad record, and cuts that do not depend on later text."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.records import documents_of, read_file, texts_of
from textmill.config import CorpusConfig
from textmill.corpus import document as sections
from textmill.corpus import records
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.records import BadRecord

TEXT = st.text(st.sampled_from("ab가é𝄞 \t\n\n\r"), max_size=400)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = ["bir\nİki", "한국어 \U0001f600", "", "mixed \ud83d\ude00"]
    data = "\n".join(
        json.dumps({"id": 1, "text": row}, ensure_ascii=index % 2 == 0) for index, row in enumerate(rows[:3])
    ).encode()
    data += b'\r\n\n{"text": "\\ud83d\\ude00"}\n  \n{"text": "last", "text": "wins", "x": NaN}'
    found = read_file(path, b"\xef\xbb\xbf" + data)
    assert texts_of(found) == ["bir\nİki", "한국어 \U0001f600", "", "", "\U0001f600", "", "wins"]
    assert [record.id for record in found if isinstance(record, Document)] == [
        f"line {number}" for number in range(1, 8)
    ]
    assert found[0].source == str(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at column 13"),
        (b"plain words", "not JSON: Expecting value at column 1"),
        (b'{"text": "a"}{"text": "b"}', "not JSON: Extra data at column 14"),
        (b'{"text": "a\tb"}', "not JSON: Invalid control character at column 12"),
        (b'{"text": "\xff\xfe"}', "not UTF-8: byte 0xff at 10"),
        (b"\xff\xfe{\x00", "it looks like UTF-16"),
        (b'{"text": "\xed\xa0\x80"}', "not UTF-8: byte 0xed at 10"),
        (b'{"text": "x\\ud800y"}', "a lone surrogate, \\ud800, at character 1"),
        (b'["text"]', "found a JSON list; expected an object with the field 'text'"),
        (b'"text"', "found a JSON text"),
        (b"17", "found a JSON number"),
        (b'{"id": "7", "body": "long words"}', "no field 'text'; found ['body', 'id']; set corpus.text_key=body"),
        (b'{"id": 7}', "no field 'text'; found ['id']"),
        (
            b'{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}',
            "no field 'text'; found ['conversations']; it is a conversation: set corpus.chat=sharegpt, in a project "
            "without plain text",
        ),
        (b'{"text": null}', "field 'text' is null, not text"),
        (b'{"text": ["a"]}', "field 'text' is list, not text"),
        (b'{"text": 1e5}', "field 'text' is number, not text"),
        (b"[" * 200_000, "JSON nested too deep"),
        (b'{"a":' * 100_000, "JSON nested too deep"),
        (b'{"text": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
        (b"\0\0\0\0", "nothing but NUL bytes"),
        (b'{"\\ud800": "x"}', "no field 'text'; found ['\\ud800']"),
    ],
)
def test_bad_line(tmp_path: Path, line: bytes, reason: str) -> None:
    good = b'{"text": "good"}\n'
    found = read_file(tmp_path / "a.jsonl", good + line + b"\n" + good)
    assert [type(record) for record in found] == [Document, BadRecord, Document]
    bad = found[1]
    assert isinstance(bad, BadRecord)
    assert reason in bad.reason
    assert (bad.place, bad.raw) == ("line 2", (line + b"\n")[:1000])
    assert str(bad).startswith(f"{tmp_path / 'a.jsonl'}:2: ")


def test_line_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 50)
    monkeypatch.setattr(records, "READ_BYTES", 7)
    found = read_file(tmp_path / "a.txt", b"x" * 50 + b"\n" + b"a\n" + b"y" * 30 + b"\n" + b"z" * 51, documents="line")
    assert [type(record) for record in found] == [BadRecord, Document, Document, BadRecord]
    assert "51 bytes, more than the maximum of 50" in str(found[0])
    assert found[3].place == "line 4"  # type: ignore[union-attr]


def test_text_key(tmp_path: Path) -> None:
    assert texts_of(read_file(tmp_path / "a.ndjson", b'{"body": "x", "text": 3}', text_key="body")) == ["x"]


def test_lines_of_text(tmp_path: Path) -> None:
    found = read_file(tmp_path / "a.txt", b"\xef\xbb\xbfbir\r\n\n  \niki\n\xff\nson", documents="line")
    assert [record.text for record in found if isinstance(record, Document)] == ["bir", "", "  ", "iki", "son"]
    assert str(found[4]).partition("; ")[0].endswith("a.txt:5: not UTF-8: byte 0xff at 0")


def test_file_as_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts_of(read_file(tmp_path / "a.md", b"\xef\xbb\xbfa\n\n\nb", documents="file")) == ["a\n\n\nb"]
    (bad,) = read_file(tmp_path / "a.txt", b"ok \x80", documents="file")
    assert "a.txt, file: not UTF-8: byte 0x80 at 3; if the file has another encoding" in str(bad)
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 3)
    assert "set corpus.documents=section" in str(read_file(tmp_path / "a.txt", b"long", documents="file")[0])


def test_blocks(tmp_path: Path) -> None:
    found = read_file(tmp_path / "a.txt", b"\n\nbir\niki\n \t\n\n\nuc\r\n\r\ndort\n\n \n", documents="block")
    assert [text.strip() for text in texts_of(found)] == ["bir\niki", "uc", "dort"]
    assert [record.id for record in found if isinstance(record, Document)] == ["block 1", "block 2", "block 3"]


def test_sections(tmp_path: Path) -> None:
    paragraph = "가나다 " * 20  # 80 characters
    at_blank = read_file(tmp_path / "a.txt", ("\n\n".join([paragraph] * 10)).encode(), section_chars=100)
    assert [len(text.split()) for text in texts_of(at_blank)] == [40] * 5
    at_line = read_file(tmp_path / "b.txt", ("\n".join([paragraph] * 10)).encode(), section_chars=100)
    assert [len(text.split()) for text in texts_of(at_line)] == [60] * 3 + [20]
    nowhere = read_file(tmp_path / "c.txt", "가".encode() * 1000, section_chars=100)
    assert [len(text) for text in texts_of(nowhere)] == [400, 400, 200]


def test_invalid_bytes_affect_one_section(tmp_path: Path) -> None:
    data = b"\n\n".join([b"a" * 150, b"b" * 75 + b"\xff" + b"b" * 75, b"c" * 150, b"\0" * 150])
    found = read_file(tmp_path / "a.txt", data, section_chars=100)
    assert [type(record) for record in found] == [Document, BadRecord, Document, BadRecord]
    assert "a.txt, section 2: not UTF-8: byte 0xff at 75; " in str(found[1])
    assert "NUL" in str(found[3])


def test_empty_file(tmp_path: Path) -> None:
    assert (
        read_file(tmp_path / "a.txt", b"")
        == read_file(tmp_path / "a.txt", b" \n\n")
        == read_file(tmp_path / "a.jsonl", b"")
        == []
    )


def split_text(data: bytes, limits: tuple[int, int, int], block: int) -> list[str]:
    before, sections.READ_BYTES = sections.READ_BYTES, block
    try:
        return list(sections.read_sections(io.BufferedReader(io.BytesIO(data)), limits))
    finally:
        sections.READ_BYTES = before


LIMITS = st.sampled_from([(1, 8, 16), (5, 10, 20), (20, 40, 80), (1, 1, 1)])


@given(TEXT, LIMITS)
@example("a\n\r\n\rb", (1, 8, 16))
def test_cutting_loses_no_character(text: str, limits: tuple[int, int, int]) -> None:
    found = split_text(text.encode(), limits, 3)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(one.strip() and len(one) <= limits[2] for one in found)


@given(st.one_of(TEXT.map(str.encode), st.binary(max_size=200)), LIMITS, st.integers(1, 70))
def test_block_size_does_not_matter(data: bytes, limits: tuple[int, int, int], block: int) -> None:
    assert split_text(data, limits, block) == split_text(data, limits, 10_000)


@given(TEXT)
@example("one line " * 200)
@example("a line\r\nand a blank one\r\n\r\n" * 40)
def test_a_record_is_cut_like_a_file_of_its_text(text: str) -> None:
    limits = sections.limits_of("section", 20)
    found = sections.cut_into_sections(text, limits)
    assert found == split_text(text.encode(), limits, 10_000)
    assert [again for one in found for again in sections.cut_into_sections(one, limits)] == found


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_long_records_become_sections(name: str, tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number} of a long text about a mill." for number in range(100))
    rows = [{"text": text}, {"text": "short"}]
    if name.endswith("csv"):
        stream = io.StringIO()
        writer = csv.DictWriter(stream, ["text"])
        writer.writeheader()
        writer.writerows(rows)
        data = stream.getvalue()
    else:
        data = json.dumps(rows) if name.endswith("json") else "".join(json.dumps(row) + "\n" for row in rows)
    whole = documents_of(read_file(tmp_path / name, data.encode()))
    found = documents_of(read_file(tmp_path / name, data.encode(), cut_records=True, section_chars=500))
    assert [one.text for one in whole] == [text, "short"]
    assert found[-1] == whole[-1]
    assert all(500 <= len(one.text) <= 1000 for one in found[:-2])
    assert "".join("".join(one.text for one in found[:-1]).split()) == "".join(text.split())
    assert found[2].id == f"{whole[0].id}, section 3"


@given(TEXT, TEXT, LIMITS)
def test_appending_changes_only_the_last_document(text: str, more: str, limits: tuple[int, int, int]) -> None:
    before = split_text(text.encode(), limits, 10)
    after = split_text((text + more).encode(), limits, 10)
    assert after[: max(len(before) - 1, 0)] == before[:-1]


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=20), st.integers(1, 60))
@example([b"PK\x03\x04", b"\0"], 1)  # a zip file, which is one bad record
def test_chunks_give_the_records_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], chunk_size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.txt"
    expected = read_file(path, b"\n".join(lines), documents="line")
    before, records.CHUNK_BYTES = records.CHUNK_BYTES, chunk_size
    try:
        assert read_file(path, b"\n".join(lines), documents="line") == expected
    finally:
        records.CHUNK_BYTES = before


@pytest.mark.parametrize(
    "line", [b"words and words\n", b"no end ", b"\n", b"  "], ids=["lines", "one line", "blank lines", "spaces"]
)
def test_memory_is_constant(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(line * (8_000_000 // len(line)))
    (chunk_size,) = split_into_chunks(find_sources([str(path)]), "section")
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_records(chunk_size, CorpusConfig(section_chars=1000)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000
    assert count == 0 or count > 1000
