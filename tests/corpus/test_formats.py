"""Every format: files from an independent writer, and damaged files."""

from __future__ import annotations

import csv
import io
import itertools
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.records import read_file
from textmill.config import CorpusConfig
from textmill.corpus import records, streams
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.formats import json as json_format
from textmill.corpus.records import BadRecord
from textmill.corpus.source import format_from_name

NIKL = {
    "id": "N1",
    "metadata": {"title": "모음"},
    "document": [
        {"id": "d1", "paragraph": [{"form": "첫째"}, {"form": "둘째"}]},
        {"id": "d2", "paragraph": [{"form": "셋째"}, {"note": "없음"}]},
        {"id": "d3", "paragraph": []},
    ],
}


def summarise(found: list[Document | BadRecord]) -> list[tuple[str, str]]:
    """(place, text), the reason of a bad record in place of its text."""
    return [(one.place, "! " + one.reason) if isinstance(one, BadRecord) else (one.id, one.text) for one in found]


# text_key


def test_nested_path(tmp_path: Path) -> None:
    settings = {"text_key": "document[].paragraph[].form", "keep_fields": ["id"]}
    for name, place in [("a.json", "value 1"), ("a.jsonl", "line 1")]:
        found = read_file(tmp_path / name, json.dumps(NIKL, ensure_ascii=False), **settings)
        assert summarise(found) == [
            (f"{place}, document[0].paragraph[0]", "첫째"),
            (f"{place}, document[0].paragraph[1]", "둘째"),
            (f"{place}, document[1].paragraph[0]", "셋째"),
            (f"{place}, document[1].paragraph[1]", "! no field 'form'; found ['note']; set corpus.text_key=note"),
            (f"{place}, document[2]", ""),
        ]
        assert [json.loads(one.meta)["id"] for one in found if isinstance(one, Document) and one.meta] == [
            "d1",
            "d1",
            "d2",
        ]


def test_joined_matches(tmp_path: Path) -> None:
    found = read_file(tmp_path / "a.json", json.dumps(NIKL), text_key="document[].paragraph[].form", join_with=" / ")
    assert [place for place, _ in summarise(found)] == [
        "value 1, document[0]",
        "value 1, document[1]",
        "value 1, document[2]",
    ]
    assert summarise(found)[0][1] == "첫째 / 둘째"
    assert isinstance(found[1], BadRecord)  # an element with a part that cannot be read is not half a document


def test_several_fields(tmp_path: Path) -> None:
    rows = '{"title": "A", "body": "b", "url": "u"}\n{"body": "only"}\n{"title": null}\n{"title": 3, "body": "b"}\n'
    found = read_file(tmp_path / "a.jsonl", rows, text_key="title+body", keep_fields=["url", "gone"])
    assert [text for _, text in summarise(found)][:2] == ["A\nb", "only"]
    assert [type(one) for one in found] == [Document, Document, BadRecord, BadRecord]
    assert [one.meta for one in found if isinstance(one, Document)] == ['{"url": "u"}', None]
    assert summarise(read_file(tmp_path / "b.jsonl", rows, text_key="title+body", join_with=": "))[0][1] == "A: b"


def test_inner_fields_and_lists_of_texts(tmp_path: Path) -> None:
    line = '{"a": {"b": "deep"}, "a.c": "dotted", "s": ["x", "y", 3], "e": []}\n'
    for key, expected in [
        ("a.b", ["deep"]),
        ("a.c", ["dotted"]),
        ("s[]", ["x", "y", "! found a JSON number; 's[]' must be a list of strings"]),
        ("e[]", [""]),
    ]:
        assert [text for _, text in summarise(read_file(tmp_path / "a.jsonl", line, text_key=key))] == expected
    assert (
        "no list 'gone[]'; found ['a', 'a.c', 'e', 's']"
        in summarise(read_file(tmp_path / "a.jsonl", line, text_key="gone[].x"))[0][1]
    )
    assert summarise(read_file(tmp_path / "a.jsonl", '[{"x": "1"}, {"x": "2"}]', text_key="[].x")) == [
        ("line 1, [0]", "1"),
        ("line 1, [1]", "2"),
    ]


# JSON


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block", [2, 7, 1 << 18])
def test_json_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int) -> None:
    monkeypatch.setattr(json_format, "BUFFER_BYTES", block)
    monkeypatch.setattr(streams, "BUFFER_BYTES", block)
    rows = [{"text": f'{number} [{{\\" 가', "n": [1.5e10, -3, True, None]} for number in range(30)]
    found = read_file(tmp_path / "a.json", json.dumps(rows, indent=indent))
    assert summarise(found) == [(f"item {number}", row["text"]) for number, row in enumerate(rows)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=5), st.integers(1, 40), st.booleans())
def test_scanner_reads_what_json_reads(values: list[Any], block: int, ascii: bool) -> None:
    data = json.dumps(values, ensure_ascii=ascii).encode(errors="surrogatepass") + b"\n17 "
    before, json_format.BUFFER_BYTES = json_format.BUFFER_BYTES, block
    try:
        scanner = json_format._Scanner(io.BufferedReader(io.BytesIO(data), block))
        assert scanner.peek() == "["
        assert list(scanner.elements()) == values
        assert scanner.value() == 17
        assert scanner.peek() == ""
    finally:
        json_format.BUFFER_BYTES = before


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", []),
        (" \n ", []),
        ("\ufeff[]", []),
        ('{"text": "one"}', [("value 1", "one")]),
        ('{\n"text": "a"\n}\n{\n"text": "b"\n}', [("value 1", "a"), ("value 2", "b")]),
        (
            '\ufeff{"text": "a"}\nbroken\n{"text": "b"}\n',
            [("line 1", "a"), ("line 2", "! not JSON: Expecting value"), ("line 3", "b")],
        ),
        (
            '[{"text": "a"}, 3, {"x": 1}]',
            [("item 0", "a"), ("item 1", "! found a JSON number"), ("item 2", "! no field 'text'")],
        ),
        ('[{"text": "a"}, {"text": "b"', [("item 0", "a"), ("item 0", "! not JSON: Expecting ',' delimiter")]),
        ('[{"text": "a"} {"text": "b"}]', [("item 0", "a"), ("item 0", "! not JSON: found '{'; expected one of")]),
        ('[{"text": "a"},', [("item 0", "a"), ("item 0", "! unexpected end of file")]),
        ('["x', [("beginning", "! not JSON: Unterminated string")]),
        ("[" * 100_000, [("beginning", "! JSON nested too deep")]),
        ('[{"text": "\\ud800"}]', [("item 0", "! a lone surrogate")]),
    ],
)
def test_json_layouts(tmp_path: Path, data: str, expected: list[tuple[str, str]]) -> None:
    found = summarise(read_file(tmp_path / "a.json", data))
    assert len(found) == len(expected), found
    for (place, text), (wanted_place, wanted_text) in zip(found, expected, strict=True):
        assert place == wanted_place
        assert text.startswith(wanted_text)


def test_json_not_utf8(tmp_path: Path) -> None:
    found = summarise(read_file(tmp_path / "a.json", b'[{"text": "a"}, {"text": "\xff"}, {"text": "b"}]'))
    assert [text[:12] for _, text in found] == ["a", "! not UTF-8,", "b"]


def test_long_lists_need_constant_memory(tmp_path: Path) -> None:
    element = json.dumps({"paragraph": [{"form": "words " * 100}]})
    for head, tail in [("[", "]"), ('{"id": 1, "document": [', '], "end": 1}')]:
        path = tmp_path / "a.json"
        path.write_text(head + ",\n".join([element] * 5_000) + tail)
        key = "paragraph[].form" if head == "[" else "document[].paragraph[].form"
        (chunk,) = split_into_chunks(find_sources([str(path)]), "section")
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_records(chunk, CorpusConfig(text_key=key))) == 5_000
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2_000_000  # of 3 MB


# CSV


@pytest.mark.parametrize(("name", "dialect"), [("a.csv", "excel"), ("a.tsv", "excel-tab"), ("a.csv", "unix")])
def test_csv(tmp_path: Path, name: str, dialect: str) -> None:
    rows = [["1", 'quoted "words", and\nlines\r\nof them', "u1"], ["2", "한국어\tsekme", ""], ["3", "", "u3"]]
    with open(tmp_path / name, "w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream, dialect).writerows([["id", "text", "url"], *rows])
    found = read_file(tmp_path / name, keep_fields=["url"])
    assert [text for _, text in summarise(found)] == [row[1] for row in rows]
    assert [place for place, _ in summarise(found)] == ["line 2", "line 5", "line 6"]
    assert [one.meta for one in found if isinstance(one, Document)] == ['{"url": "u1"}', '{"url": ""}', '{"url": "u3"}']
    joined = read_file(tmp_path / name, text_key="id+text", join_with=" ")
    assert summarise(joined)[1][1] == "2 한국어\tsekme"


def test_csv_damage(tmp_path: Path) -> None:
    data = b'text,n\r\ngood,1\r\nmore,2,3\r\nfew\r\n\r\n\xff,4\r\n"a"b,5\r\nend,6\r\n"open,7\r\nnever closed,8\r\n'
    found = summarise(read_file(tmp_path / "a.csv", data))
    assert [(place, text[:11]) for place, text in found] == [
        ("line 2", "good"),
        ("line 3", "! found 3 f"),
        ("line 4", "! found 1 f"),
        ("line 6", "! not UTF-8"),
        ("line 7", "! not CSV: "),
        ("line 8", "end"),
        ("line 9", "! not CSV: "),
        ("line 10", "never close"),
    ]


def test_csv_wrong_column(tmp_path: Path) -> None:
    assert summarise(read_file(tmp_path / "a.csv", "id,body\n1,long words\n")) == [
        ("line 2", "! no field 'text'; found ['body', 'id']; set corpus.text_key=body")
    ]
    assert read_file(tmp_path / "a.csv", "") == read_file(tmp_path / "a.csv", "text\n") == []


# Parquet and Arrow


def table(count: int = 1000) -> pa.Table:
    return pa.table(
        {
            "text": [f"satır {number}" for number in range(count)],
            "url": [f"u{number}" for number in range(count)],
            "inner": [{"form": [f"f{number}", "g"]} for number in range(count)],
        }
    )


@pytest.mark.parametrize("chunk", [1, 4000, 1 << 30])
def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(records, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=100)
    assert len(split_into_chunks(find_sources([str(path)]), "section")) == {1: 10, 1 << 30: 1}.get(chunk, 5)
    found = read_file(path, keep_fields=["url"])
    assert summarise(found) == [(f"row {number}", f"satır {number}") for number in range(1000)]
    assert found[7].meta == '{"url": "u7"}'  # type: ignore[union-attr]
    nested = summarise(read_file(path, text_key="inner.form[]"))
    assert nested[:3] == [("row 0, inner.form[0]", "f0"), ("row 0, inner.form[1]", "g"), ("row 1, inner.form[0]", "f1")]


def test_parquet_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a", "b"], "n": [1, 2]}), path)
    assert summarise(read_file(path)) == [
        (f"row {row}", "! no column 'text'; found ['body', 'n']; set corpus.text_key=body") for row in (0, 1)
    ]
    pq.write_table(pa.table({"text": ["a", None]}), path)
    assert summarise(read_file(path)) == [("row 0", "a"), ("row 1", "! field 'text' is null, not text")]
    bad = pa.array([b"ok", b"\xff", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), path)
    assert [text for _, text in summarise(read_file(path))] == ["ok", "! not UTF-8: byte 0xff at 0", "fine"]
    pq.write_table(table(), path)
    ((place, text),) = summarise(read_file(path, path.read_bytes()[:-100]))
    assert place == "beginning"
    assert "incomplete Parquet file" in text
    ((_, text),) = summarise(read_file(path, b""))
    assert "incomplete Parquet file" in text


def test_parquet_damage_inside(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        table(), path, row_group_size=250, compression="zstd", use_dictionary=False, write_page_checksum=True
    )
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = group.data_page_offset
    data[start : start + group.total_compressed_size] = b"\xee" * group.total_compressed_size
    found = read_file(path, bytes(data))
    assert [one.place for one in found if isinstance(one, BadRecord)] == ["row 250"]
    assert [one.id for one in found if isinstance(one, Document)] == [
        f"row {row}" for row in range(1000) if not 250 <= row < 500
    ]


def test_parquet_with_a_column_that_is_too_short(tmp_path: Path) -> None:
    """Some flipped bits of the footer make pyarrow read a column as shorter, without an error."""
    path = tmp_path / "a.parquet"
    numbers = pa.array([str(number) for number in range(50)])
    pq.write_table(pa.table({"text": pa.array(["a"] * 50), "n": numbers, "meta": pa.nulls(50, pa.string())}), path)
    whole = path.read_bytes()
    for place, bit in itertools.product(range(len(whole) - 1, 4, -1), (1, 2, 4, 8, 16)):
        data = whole[:place] + bytes([whole[place] ^ bit]) + whole[place + 1 :]
        found = read_file(path, data, keep_fields=["n", "meta"])
        reasons = [one.reason for one in found if isinstance(one, BadRecord)]
        if reasons == ["damaged from here to row 50: a column has fewer rows"]:
            return
    pytest.fail("no flipped bit makes a column shorter")


@pytest.mark.parametrize("kind", ["stream", "file"])
def test_arrow(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.arrow"
    with open(path, "wb") as stream, getattr(pa.ipc, f"new_{kind}")(stream, table().schema) as writer:
        writer.write_table(table(), max_chunksize=100)
    assert summarise(read_file(path)) == [(f"row {number}", f"satır {number}") for number in range(1000)]
    *before, bad = read_file(path, path.read_bytes()[:-2000])
    assert isinstance(bad, BadRecord)
    assert summarise(before) == [(f"row {number}", f"satır {number}") for number in range(len(before))]
    assert len(before) > (500 if kind == "stream" else -1)


def test_gzipped_parquet_is_refused(tmp_path: Path) -> None:
    assert format_from_name("a.parquet.gz") is None
    assert format_from_name("A.JSONL.GZ") == "jsonl"


# Wikipedia


def test_wikiextractor(tmp_path: Path) -> None:
    data = (
        '<doc id="12" url="https://x.org/?curid=12" title="A &amp; B">\nA &amp; B\n\n1 &lt; 2\n\n</doc>\n\n'
        '<doc id="13" url="u" title="C">\nC\n</doc>\nstray\n<doc id="14" url="u" title="D">\nnever ends\n'
    )
    found = read_file(tmp_path / "AA" / "wiki_00", data)
    assert [(place, text.strip()) for place, text in summarise(found)] == [
        ("page 12", "A & B\n\n1 < 2"),
        ("page 13", "C"),
        ("line 11", "! text outside a <doc> block"),
        ("line 12", "! <doc> block without </doc>"),
    ]
    assert found[0].meta == '{"title": "A & B"}'  # type: ignore[union-attr]
    lines = '{"id": "1", "url": "u", "title": "T", "text": "one"}\n{"id": "2", "title": "U", "text": "two"}\n'
    (tmp_path / "AA" / "wiki_01").write_text(lines)
    names = [source.name for source in find_sources([str(tmp_path)])]
    assert names == [str(tmp_path / "AA" / "wiki_00"), str(tmp_path / "AA" / "wiki_01")]
    assert summarise(read_file(tmp_path / "AA" / "wiki_01")) == [("line 1", "one"), ("line 2", "two")]


def dump(pages: list[tuple[int, int, str, str, bool]]) -> str:
    head = (
        '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" xml:lang="tr"><siteinfo><namespaces>'
        '<namespace key="0" /><namespace key="6">Dosya</namespace><namespace key="14">Kategori</namespace>'
        "</namespaces></siteinfo>\n"
    )
    body = ""
    for number, space, title, text, redirect in pages:
        body += f"<page><title>{title}</title><ns>{space}</ns><id>{number}</id>" + (
            '<redirect title="x" />' if redirect else ""
        )
        body += f"<revision><id>9{number}</id><text>{text}</text></revision></page>\n"
    return head + body + "</mediawiki>"


PAGES = [
    (
        1,
        0,
        "Bir",
        "'''Bir''' [[sayı]]dır.{{Kutu|a={{b}}}} [[Dosya:x.jpg|thumb|bir [[resim]]]]&lt;ref&gt;not&lt;/ref&gt; Son.",
        False,
    ),
    (2, 10, "Şablon:x", "şablon", False),
    (3, 0, "Yön", "#REDIRECT [[Bir]]", True),
    (4, 0, "İki", "== Başlık ==\n* [[Bir|bire]] bak\n[[Kategori:Sayılar]]\n", False),
]


def test_mediawiki(tmp_path: Path) -> None:
    found = read_file(tmp_path / "pages-articles.xml", dump(PAGES))
    assert summarise(found) == [("page 1", "Bir sayıdır.  Son."), ("page 4", "Başlık\nbire bak")]
    assert [one.meta for one in found if isinstance(one, Document)] == ['{"title": "Bir"}', '{"title": "İki"}']
    assert summarise(read_file(tmp_path / "pages-articles.xml", text_key="title+text"))[1][1] == "İki\nBaşlık\nbire bak"


def test_truncated_mediawiki_dump(tmp_path: Path) -> None:
    whole = dump([(number, 0, f"T{number}", "söz " * 30, False) for number in range(1, 200)])
    *before, bad = read_file(tmp_path / "a.xml", whole[: whole.index("<id>150<") + 30])
    assert [place for place, _ in summarise(before)] == [f"page {number}" for number in range(1, 150)]
    assert isinstance(bad, BadRecord)
    assert bad.place == "after page 149"
    assert read_file(tmp_path / "b.xml", "") == []
    ((place, text),) = summarise(read_file(tmp_path / "c.xml", "no xml at all"))
    assert (place, text[:9]) == ("beginning", "! invalid")


@pytest.mark.long
def test_mediawiki_needs_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.xml"
    path.write_text(dump([(number, 0, f"T{number}", "word " * 300, False) for number in range(3000)]))
    (chunk,) = split_into_chunks(find_sources([str(path)]), "section")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(chunk, CorpusConfig())) == 3000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_500_000  # of 4.5 MB


def test_damaged_files_never_crash(tmp_path: Path) -> None:
    """Any bytes under any name give records or bad records, never an exception."""
    rng = random.Random(5)
    pq.write_table(table(50), tmp_path / "seed.parquet")
    seeds = {
        "a.parquet": (tmp_path / "seed.parquet").read_bytes(),
        "a.json": json.dumps(NIKL).encode(),
        "a.xml": dump(PAGES).encode(),
        "a.csv": b'text,n\n"a\nb",1\nc,2\n',
        "wiki_00": b'<doc id="1" title="x">\nx\n</doc>\n',
        "a.jsonl": b'{"text": "x"}\n' * 5,
    }
    for name, data in seeds.items():
        for _ in range(25):
            spoilt = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
            read_file(
                tmp_path / name,
                bytes(spoilt[: rng.randint(1, len(spoilt))]),
                text_key=rng.choice(["text", "document[].paragraph[].form"]),
            )
