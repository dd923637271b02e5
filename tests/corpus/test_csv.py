"""CSV and TSV: a stray quote costs one row, and delimiter, quotes, header and encoding are found or set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.support.records import read_file
from textmill.config import CorpusConfig, RunConfig
from textmill.corpus.document import Document
from textmill.corpus.find_sources import find_sources
from textmill.corpus.formats import csv as csv_format
from textmill.corpus.inspection import describe_layouts
from textmill.corpus.prepare import prepare
from textmill.corpus.records import BadRecord
from textmill.errors import TextmillError


def read(path: Path, data: str | bytes, **settings: Any) -> tuple[list[str], list[BadRecord]]:
    found = read_file(path, data, **settings)
    texts = [record.text for record in found if isinstance(record, Document)]
    return texts, [record for record in found if isinstance(record, BadRecord)]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_stray_quote_costs_one_row(tmp_path: Path, name: str, delimiter: str) -> None:
    rows = [f"{n}{delimiter}words {n}" for n in range(500)]
    rows[100] = '"' + rows[100]
    rows[200] = f'200{delimiter}"words 200'
    texts, bad = read(tmp_path / name, f"id{delimiter}text\n" + "\n".join(rows) + "\n")
    assert texts == [f"words {n}" for n in range(500) if n not in (100, 200)]
    assert [(one.place, one.raw.decode().rstrip()) for one in bad] == [("line 102", rows[100]), ("line 202", rows[200])]
    assert [one.bytes_lost for one in bad] == [len(rows[100]) + 1, len(rows[200]) + 1]


def test_a_stray_quote_that_a_later_row_closes_costs_its_row(tmp_path: Path) -> None:
    rows = [f"{n},words {n}" for n in range(50)]
    rows[10] = '"10,words 10'
    rows[20] = '20,words"'  # with the quote of row 10: one field instead of two
    texts, bad = read(tmp_path / "a.csv", "id,text\n" + "\n".join(rows) + "\n")
    assert texts == ['words"' if n == 20 else f"words {n}" for n in range(50) if n != 10]
    assert [one.place for one in bad] == ["line 12"]


def test_a_long_row_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_format, "MAX_ROW_BYTES", 1000)
    rows = ['0,"words 0', *(f"{n},words {n}" for n in range(1, 300)), '300,"closed\nhere"']
    texts, bad = read(tmp_path / "a.csv", "id,text\n" + "\n".join(rows) + "\n")
    assert texts == [*(f"words {n}" for n in range(1, 300)), "closed\nhere"]
    assert [one.place for one in bad] == ["line 2"]


def test_unreadable_bytes_stop_prepare_too(tmp_path: Path) -> None:
    good = json.dumps([{"text": f"words {n}"} for n in range(100)])
    (tmp_path / "a.json").write_text(good + '{"text": broken' + " and lost" * 9999, encoding="utf-8")
    corpus = {"sources": [str(tmp_path / "a.json")], "folder": str(tmp_path / "corpus")}
    with pytest.raises(TextmillError, match=r"corpus.sources: 90,\d\d\d of 9\d,\d\d\d bytes are unreadable, more than"):
        prepare(RunConfig.model_validate({"corpus": corpus}))
    prepare(RunConfig.model_validate({"corpus": {**corpus, "max_unreadable": 1}}))
    account = json.loads((tmp_path / "corpus" / "account.json").read_text(encoding="utf-8"))
    assert (account["quarantined"], account["quarantined_bytes"]) == (1, 15 + 9 * 9999)


@pytest.mark.parametrize("header", ["text,text\n", "text,n,text\n"])
def test_the_text_column_may_not_occur_twice(tmp_path: Path, header: str) -> None:
    with pytest.raises(TextmillError, match="the header has the column 'text' twice"):
        read(tmp_path / "a.csv", header + "a,b,c\n"[: 2 * header.count(",") + 2])
    assert read(tmp_path / "a.csv", "n,text,n\n1,words,2\n") == (["words"], [])


def test_settings_override_what_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    assert read(path, 'text;n\nfirst;1\n"a;b";2\n')[0] == ["first", "a;b"]
    assert read(path, 'text;n\nx, "y;1\n"a, b;2\n', quoting="none")[0] == ['x, "y', '"a, b']
    assert read(path, "a^b\nc^d\n", delimiter="^", header=False, text_key="column2")[0] == ["b", "d"]
    assert read(path, "long words\nmore words\n", header=False)[0] == ["long words", "more words"]
    assert read(path, "1,first words\n2,more words\n", text_key="column2")[0] == ["first words", "more words"]
    assert read(path, "text\nétude\n".encode("cp1252"), encoding="cp1252")[0] == ["étude"]
    assert read(path, "text\tn\nwords\t1\n", delimiter="tab")[0] == ["words"]


@pytest.mark.parametrize("setting", [{"delimiter": "ab"}, {"delimiter": '"'}, {"encoding": "utf-9"}])
def test_wrong_settings(setting: dict[str, str]) -> None:
    with pytest.raises(TextmillError, match=f"corpus.{next(iter(setting))}: "):
        CorpusConfig(**setting)  # type: ignore[arg-type]


def test_a_detected_dialect_is_printed_with_the_address_of_its_file() -> None:
    address = "memory:///a.csv"
    with fsspec.open(address, "w") as stream:
        stream.write("text;n\n" + "".join(f"words {n};{n}\n" for n in range(9)))
    (line,) = describe_layouts(find_sources([address]), CorpusConfig())
    assert line == f"1 file read with delimiter semicolon, double quotes, a header: {address}"


def test_an_encoding_is_claimed_only_of_the_files_that_were_looked_at(tmp_path: Path) -> None:
    for number in range(201):
        (tmp_path / f"{number:03}.txt").write_bytes("günaydın".encode("cp1254"))
    sources = find_sources([str(tmp_path)], encoding="cp1254")
    (line,) = describe_layouts(sources, CorpusConfig(encoding="cp1254"))
    assert line == f"200 files of the first 200 read with encoding cp1254: {tmp_path / '000.txt'} ..."


def test_prepare_prints_what_it_detected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = "text;n\n" + "".join(f"words {n};{n}\n" for n in range(9))
    (tmp_path / "a.csv").write_bytes(rows.encode("utf-16-le"))
    corpus = {"sources": [str(tmp_path / "a.csv")], "folder": str(tmp_path / "corpus")}
    prepare(RunConfig.model_validate({"corpus": corpus}))
    expected = "1 file read with delimiter semicolon, double quotes, a header, encoding utf-16-le: "
    assert f"{expected}{tmp_path / 'a.csv'}\n" in capsys.readouterr().out
