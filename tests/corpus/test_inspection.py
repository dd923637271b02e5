"""What a sample of the records shows: text field, conversations, encoding, delimiter, header."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from textmill.config import CorpusConfig
from textmill.corpus.encodings import detect_encoding, suggest_encoding
from textmill.corpus.find_sources import find_sources, read_records, split_into_chunks
from textmill.corpus.inspection import RecordFacts, inspect_records
from textmill.corpus.records import BadRecord

PROSE = "A short sentence about nothing in particular, number {}."
KOREAN = "아무 내용도 없는 짧은 문장입니다. 번호는 {} 번입니다.\n"


def facts(path: Path, data: str | bytes) -> RecordFacts:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return inspect_records(find_sources([str(path)]), CorpusConfig())


def lines(*records: object) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def test_finds_a_nested_field(tmp_path: Path) -> None:
    rows = [
        {"id": f"x{n}", "meta": {"url": "https://e.org/" + "a" * 300}, "doc": {"body": PROSE.format(n)}}
        for n in range(5)
    ]
    assert facts(tmp_path / "a.jsonl", lines(*rows)).text_key == "doc.body"
    large = {"document": [{"id": n, "paragraph": [{"form": PROSE.format(m)} for m in range(900)]} for n in range(9)]}
    assert facts(tmp_path / "b.json", json.dumps(large)).text_key == "document[].paragraph[].form"
    assert facts(tmp_path / "c.json", json.dumps(["one text", "another text"])).text_key == "[]"
    assert facts(tmp_path / "d.jsonl", lines({"text": "short", "other": "x y" * 99})).text_key == "text"
    assert facts(tmp_path / "e.jsonl", lines({"n": 1}, {"n": 2})).text_key is None


def test_files_with_other_fields_are_read_too(tmp_path: Path) -> None:
    def key_of(**files: list[dict[str, str]]) -> str | None:
        folder = tmp_path / "-".join(files)
        folder.mkdir()
        for name, rows in files.items():
            (folder / f"{name}.jsonl").write_text(lines(*rows))
        return inspect_records(find_sources([str(folder)]), CorpusConfig()).text_key

    texts, bodies, notes = ([{name: PROSE.format(n)} for n in range(5)] for name in ("text", "body", "note"))
    assert key_of(a=texts, b=bodies, c=notes) == "text+body+note"
    assert key_of(d=notes, e=notes) == "note"
    both = [{"text": PROSE.format(n), "body": "a summary of it"} for n in range(5)]
    licence = [{"name": "a corpus", "license": "Apache License 2.0"}]
    assert key_of(h=texts, i=licence) == "text", "a name is no text"
    assert key_of(f=both, g=bodies) == "text", "joined fields would change the texts of the first file"


def test_one_table_among_many_texts_is_examined(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(PROSE)
    (tmp_path / "first.jsonl").write_text(lines(*({"content": PROSE.format(n)} for n in range(5))))
    (tmp_path / "last.csv").write_text(
        "no,正文\n" + "".join(f"{n},{PROSE.format(n).replace(',', '')}\n" for n in range(5))
    )
    sources = find_sources([str(tmp_path / "first.jsonl"), str(tmp_path / "*.txt"), str(tmp_path / "last.csv")])
    assert inspect_records(sources, CorpusConfig()).text_key == "content+正文"


@pytest.mark.parametrize(
    "names", ["Question,ANSWER", "질문,답변", "Soru,Yanıt", "soru,cevap", "问题,回答", "質問,回答"]
)
def test_finds_questions_and_answers_by_their_columns(names: str, tmp_path: Path) -> None:
    rows = "".join(f"is it {n}?,yes\n" for n in range(5))
    assert facts(tmp_path / "a.csv", f"{names}\n{rows}").chat == "pairs"


def test_finds_conversations(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    shares = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    found = [
        facts(tmp_path / "a.jsonl", lines({"messages": turns})),
        facts(tmp_path / "b.jsonl", lines({"dialog": turns})),
        facts(tmp_path / "c.jsonl", lines({"conversations": shares})),
        facts(tmp_path / "d.json", json.dumps([{"instruction": "Do", "input": "", "output": "done", "text": "all"}])),
        facts(tmp_path / "e.csv", "Question,Answer\nWhy?,Because.\n"),
    ]
    assert [(one.chat, one.text_key) for one in found] == [
        ("messages", "text"),
        ("messages", "dialog"),
        ("sharegpt", "text"),
        ("alpaca", "text"),
        ("pairs", "text"),
    ]
    assert facts(tmp_path / "f.jsonl", lines({"text": PROSE, "question": "q", "answer": "a"})).chat is None


@pytest.mark.parametrize(("delimiter", "name"), [(",", "a.csv"), (";", "a.csv"), ("\t", "a.tsv"), ("|", "a.csv")])
def test_finds_the_delimiter_and_the_column(tmp_path: Path, delimiter: str, name: str) -> None:
    rows = [["id", "review"], *([str(n), f'"Well, {n}; a | of\ta ""text"" here"'] for n in range(9))]
    found = facts(tmp_path / name, "".join(delimiter.join(row) + "\n" for row in rows))
    assert (found.delimiter, found.header, found.text_key, found.fields) == (
        delimiter,
        True,
        "review",
        ("id", "review"),
    )


def test_finds_that_there_is_no_header(tmp_path: Path) -> None:
    found = facts(tmp_path / "a.csv", "".join(f"{n},some words of text\n" for n in range(9)))
    assert (found.header, found.text_key) == (False, "column2")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-16", "cp949", "utf-8-sig"])
def test_finds_the_encoding(tmp_path: Path, encoding: str) -> None:
    text = "".join(KOREAN.format(n) for n in range(40))
    found = facts(tmp_path / "a.txt", text.encode(encoding))
    assert found.encoding == {"utf-16": "utf-16-le", "utf-8-sig": "utf-8"}.get(encoding, encoding)
    assert (found.text_key, found.chat, found.delimiter) == ("text", None, None)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Der Mädchenname für schöne Bücher. Ça été déjà naïve. "),
        ("shift_jis", "これは日本語の文章です。とても短い。"),
        ("gb18030", "这是一个简短的中文句子，没有什么内容。"),
        ("cp1251", "Это короткое предложение ни о чём. "),
        ("cp1254", "Değirmenin çarkı ağır ağır dönüyor, ırmak şırıl şırıl akıyor. "),
        ("cp1252", "Það er góður dagur og þýðing verður í blaðinu. "),
    ],
)
def test_suggests_an_older_encoding(encoding: str, text: str) -> None:
    assert suggest_encoding((text * 9).encode(encoding)) == encoding
    assert suggest_encoding((text * 9).encode() + b"\xff") is None  # UTF-8 with one damaged byte


def test_suggests_no_encoding_for_scripts_that_only_share_bytes_with_others() -> None:
    assert suggest_encoding("Ο μύλος γυρίζει δίπλα στο ποτάμι.".encode("cp1253")) is None
    assert suggest_encoding("הטחנה עומדת ליד הנהר הגדול".encode("cp1255")) is None
    assert suggest_encoding("Мельница стоит у реки и мелет зерно".encode("koi8-r")) is None


def test_nul_bytes_alone_are_not_utf16() -> None:
    assert detect_encoding(b"a line\n" * 50 + b"\0" * 512) == "utf-8"
    assert detect_encoding(b"a line\0\n" * 50) == "utf-8"
    assert detect_encoding(b"") == "utf-8"


def test_looks_at_tables(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", "b"], "article": [PROSE, PROSE]}), tmp_path / "a.parquet")
    found = inspect_records(find_sources([str(tmp_path / "a.parquet")]), CorpusConfig())
    assert (found.text_key, found.fields) == ("article", ("id", "article"))


def test_conversations_in_three_layouts(tmp_path: Path) -> None:
    chats = {
        "a": {"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]},
        "b": {"conversations": [{"from": "human", "value": "where?"}, {"from": "gpt", "value": "here"}]},
        "c": {"instruction": "when?", "input": "", "output": "now"},
    }
    for name, record in chats.items():
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(record) + "\n") * 9)
    sources = find_sources([str(tmp_path)])
    found = inspect_records(sources, CorpusConfig())
    assert (found.chat, found.text_key) == ("auto", None)
    config = CorpusConfig(chat="auto")
    records = [record for chunk in split_into_chunks(sources, "section") for record in read_records(chunk, config)]
    assert len(records) == 27
    assert not any(isinstance(record, BadRecord) for record in records)
