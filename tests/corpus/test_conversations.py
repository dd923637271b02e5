"""Conversations in every layout: the turns, the errors, and the result of `prepare`."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from textmill.cli import main
from textmill.config import RunConfig
from textmill.corpus.conversations import read_conversation, turns_from_json, turns_to_json
from textmill.corpus.prepare import prepare
from textmill.corpus.records import UnreadableRecord
from textmill.corpus.shards import list_shards, open_corpus
from textmill.errors import TextmillError
from textmill.storage.files import read_json

TURNS = (("user", "안녕?"), ("assistant", "반가워요."))
SHAPED: list[tuple[str, dict[str, Any], tuple[tuple[str, str], ...]]] = [
    (
        "messages",
        {"messages": [{"role": "user", "content": "안녕?"}, {"role": "assistant", "content": "반가워요."}]},
        TURNS,
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "안녕?"}, {"from": "gpt", "value": "반가워요."}]},
        TURNS,
    ),
    (
        "sharegpt",
        {"conversations": [{"from": "human", "value": "q"}], "system": "Be brief."},
        (("system", "Be brief."), ("user", "q")),
    ),
    ("alpaca", {"instruction": "안녕?", "input": "", "output": "반가워요."}, TURNS),
    ("alpaca", {"instruction": "Add.", "input": "1 2", "output": "3"}, (("user", "Add.\n\n1 2"), ("assistant", "3"))),
    ("pairs", {"Q": "안녕?", "A": "반가워요.", "label": "0"}, TURNS),
    ("pairs", {"question": "안녕?", "answer": "반가워요."}, TURNS),
]


@pytest.mark.parametrize(("shape", "record", "turns"), SHAPED)
def test_every_layout_is_read_and_recognised(shape: str, record: dict[str, Any], turns: Any) -> None:
    assert read_conversation(record, shape) == turns
    assert read_conversation(record, "auto") == turns
    assert tuple(turns_from_json(turns_to_json(turns))) == turns


@pytest.mark.parametrize(
    ("shape", "record", "message"),
    [
        ("auto", {"messages": [], "conversations": []}, "could be messages or sharegpt; set corpus.chat"),
        ("auto", {"text": "x"}, "no conversation in the fields"),
        (
            "pairs",
            {"q": "1", "a": "2", "prompt": "3", "response": "4"},
            "found both q\\+a and prompt\\+response; name the two",
        ),
        ("pairs", {"Q": "1"}, "no question and answer"),
        ("messages", {"messages": [{"role": "tool", "content": "x"}]}, "turn 1: role is 'tool'; expected one of"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "turn 1: 'content' is NoneType, not text"),
        ("messages", {"messages": []}, "without turns"),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "turn 2 is a system turn",
        ),
        ("messages", {"dialog": []}, "no list 'messages'; found \\['dialog'\\]"),
        ("alpaca", {"instruction": "x"}, "'output' is missing, not text"),
        ("messages", ["x"], "not an object"),
    ],
)
def test_error_for_a_record_that_is_no_conversation(shape: str, record: Any, message: str) -> None:
    with pytest.raises(UnreadableRecord, match=message):
        read_conversation(record, shape)


@pytest.mark.parametrize(("shape", "record", "turns"), SHAPED)
@pytest.mark.parametrize("setting", ["messages", "pairs"])
def test_the_error_for_another_layout_names_the_right_one(
    setting: str, shape: str, record: dict[str, Any], turns: Any
) -> None:
    if setting != shape:
        with pytest.raises(UnreadableRecord, match=f"set corpus.chat={shape}$"):
            read_conversation(record, setting)


def test_fields_with_other_names() -> None:
    assert read_conversation({"dialog": [{"role": "user", "content": "x"}]}, "messages", "dialog") == (("user", "x"),)
    assert read_conversation({"frage": "x", "antwort": "y"}, "pairs", "frage+antwort") == (
        ("user", "x"),
        ("assistant", "y"),
    )
    with pytest.raises(UnreadableRecord, match="does not name two of the fields"):
        read_conversation({"frage": "x"}, "pairs", "frage+antwort")


def prepare_documents(folder: Path, sources: list[str], **corpus: Any) -> list[list[tuple[str, str]]]:
    config = RunConfig.model_validate(
        {"folder": str(folder / "out"), "corpus": {"sources": sources, "split": [1, 0, 0], **corpus}}
    )
    folder = prepare(config)
    found = [
        turns_from_json(row)
        for path in list_shards(folder, "train")
        for row in pq.read_table(path).column("messages").to_pylist()
    ]
    assert found == [list(document.turns or ()) for document in open_corpus(folder, "train")]
    return found


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_prepare_reads_conversations_from_every_format(kind: str, tmp_path: Path) -> None:
    rows = [
        {"Q": "  한국어  질문?", "A": "네\r\n그래요 "},
        {"Q": 'two, with "quotes"', "A": "<|user|> 🙂"},
        {"Q": "no answer", "A": ""},
    ]
    path = tmp_path / f"pairs.{kind}"
    if kind == "csv":
        with open(path, "w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["Q", "A"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(
            json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    found = prepare_documents(tmp_path, [str(path)], chat="pairs")
    assert [[text for _, text in turns] for turns in found] == [
        ["한국어  질문?", "네\n그래요"],
        [rows[1]["Q"], rows[1]["A"]],
        ["no answer", ""],
    ]
    assert [document.text for document in open_corpus(tmp_path / "out" / "corpus", "train")] == [
        "\n".join(text for _, text in turns) for turns in found
    ]
    account = read_json(tmp_path / "out" / "corpus" / "account.json")
    assert (account["records"], account["kept"]) == (3, 3)
    assert account["changed"]["newlines"] == 1


def test_dedup_and_filters_use_the_complete_conversation(tmp_path: Path) -> None:
    lines = [("a b", "c"), ("a", "b c"), ("a b", "c"), ("x", "y")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in lines))
    found = prepare_documents(tmp_path, [str(path)], chat="auto", min_chars=4)
    assert [[text for _, text in turns] for turns in found] == [["a b", "c"], ["a", "b c"]]
    account = read_json(tmp_path / "out" / "corpus" / "account.json")
    assert account["dropped"] == {"duplicate": 1, "short": 1}


def test_plain_text_is_refused(tiny_texts: Path, tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match=r"corpus.chat: .*english.txt has no fields .*; use JSON"):
        prepare_documents(tmp_path, [str(tiny_texts)], chat="pairs")


def test_ambiguous_names_stop_prepare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "1", "a": "2", "prompt": "3", "response": "4"}\n')
    (tmp_path / "run.yaml").write_text("folder: out\ncorpus: {sources: [a.jsonl], chat: pairs}\n")
    assert main(["prepare", str(tmp_path / "run.yaml")]) == 2
    assert (
        "found both q+a and prompt+response; name the two fields with corpus.text_key=QUESTION+ANSWER"
        in capsys.readouterr().err
    )
    assert main(["prepare", str(tmp_path / "run.yaml"), "corpus.text_key=prompt+response"]) == 0


def test_shared_korean_pairs(shared_data: Path, tmp_path: Path) -> None:
    path = shared_data / "ko_chatbot" / "ChatbotData.csv"
    found = prepare_documents(tmp_path, [str(path)], chat="pairs", dedup="none", rules=[])
    with open(path, encoding="utf-8-sig", newline="") as stream:
        assert found == [[("user", row["Q"]), ("assistant", row["A"])] for row in csv.DictReader(stream)]
