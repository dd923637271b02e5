"""Examples with labels: the formats that are read, the splits, and mistakes with their file and line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from textmill.cli import main
from textmill.config import CorpusConfig
from textmill.corpus.find_sources import find_sources
from textmill.corpus.labelled import Example, read_examples, read_split
from textmill.storage.files import read_json

SEQUENCES, WORDS, ANSWERS = "sequence-classification", "token-classification", "question-answering"
YAML = """
folder: .
corpus: {{labels: {task}, sources: [{files}], source_splits: {{{splits}}}}}
model: {{family: bert, size: tiny}}
train: {{layout: labelled, length: 128, batch: 2}}
tokens: {{overlap: 16}}
"""


def read(path: Path, task: str, **settings: Any) -> list[Example]:
    config = CorpusConfig(labels=task, sources=[str(path)], **settings)  # type: ignore[arg-type]
    return [one for source in find_sources([str(path)]) for one in read_examples(source, task, config)]


def squad(*questions: dict[str, Any], context: str = "Kim lives in Seoul.") -> dict[str, Any]:
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}


def question(id_: str, text: str | None, start: int = 0) -> dict[str, Any]:
    answers = [] if text is None else [{"text": text, "answer_start": start}]
    return {"id": id_, "question": "Where?", "answers": answers, "is_impossible": text is None}


def test_csv_and_json_lines_give_the_same_examples(tmp_path: Path) -> None:
    rows = [('Good, "really"', "yes", 1), ("so\nso", "", 0)]
    (tmp_path / "a.csv").write_text('one,two,score\n"Good, ""really""",yes,1\n"so\nso",,0\n')
    lines = [json.dumps({"one": one, "two": two, "score": score}) for one, two, score in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n")
    (tmp_path / "a.json").write_text(json.dumps([json.loads(line) for line in lines]))
    found = {
        end: [
            (example.texts, example.labels)
            for example in read(tmp_path / f"a.{end}", SEQUENCES, text_key="one + two", label_key="score")
        ]
        for end in ("csv", "jsonl", "json")
    }
    wanted = [((one, two), (str(score),)) for one, two, score in rows]
    assert found == {"csv": wanted, "jsonl": wanted, "json": wanted}


def test_conll_and_json_lines_give_the_same_words(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text(
        "-DOCSTART- -X- O\n\n# id = 7\nKim NNP B-PER\nlives VBZ O\n\n# NN O\nSeoul NNP B-LOC\n", encoding="utf-8"
    )
    (tmp_path / "tabs.txt").write_text("## klue-1\tKim lives\nKim\tB-PER\n \tO\nlives\tO\n\n#\tO\nSeoul\tB-LOC")
    rows = [(["Kim", "lives"], ["B-PER", "O"]), (["#", "Seoul"], ["O", "B-LOC"])]
    lines = [json.dumps({"tokens": words, "ner_tags": labels}) for words, labels in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    wanted = [(tuple(words), tuple(labels)) for words, labels in rows]
    assert [(one.texts, one.labels) for one in read(tmp_path / "a.conll", WORDS)] == wanted
    assert [one.place for one in read(tmp_path / "a.conll", WORDS)] == ["line 4", "line 7"]
    assert [(one.texts, one.labels) for one in read(tmp_path / "a.jsonl", WORDS)] == wanted
    spaced = [(("Kim", " ", "lives"), ("B-PER", "O", "O")), wanted[1]]
    assert [(one.texts, one.labels) for one in read(tmp_path / "tabs.txt", WORDS)] == spaced


def test_squad_and_json_lines_give_the_same_questions(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(squad(question("q1", "Seoul", 13), question("q2", None))))
    rows = [
        {
            "id": "q1",
            "context": "Kim lives in Seoul.",
            "question": "Where?",
            "answers": {"text": ["Seoul"], "answer_start": [13]},
        },
        {
            "id": "q2",
            "context": "Kim lives in Seoul.",
            "question": "Where?",
            "answers": {"text": [], "answer_start": []},
        },
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [
        [(one.texts, one.answers, one.id) for one in read(tmp_path / f"a.{end}", ANSWERS)] for end in ("json", "jsonl")
    ]
    texts = ("Where?", "Kim lives in Seoul.")
    assert found[0] == found[1] == [(texts, (("Seoul", 13),), "q1"), (texts, (), "q2")]


def run_prepare(folder: Path, task: str, *files: str) -> int:
    splits = ", ".join(f"{name}: {name.partition('.')[0]}" for name in files)
    (folder / "c.yaml").write_text(YAML.format(task=task, files=", ".join(files), splits=splits))
    return main(["prepare", str(folder / "c.yaml")])


def test_splits_and_labels_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\n" + "".join(f"text {n},{n % 11}\n" for n in range(40)))
    (tmp_path / "valid.csv").write_text("text,label\nother,10\n")
    assert run_prepare(tmp_path, SEQUENCES, "train.csv", "valid.csv") == 0
    account = read_json(tmp_path / "corpus" / "account.json")
    assert account["labels"]["names"] == [str(number) for number in range(11)], "sorted as numbers"
    assert {split: account["by_split"][split]["documents"] for split in ("train", "valid")} == {"train": 40, "valid": 1}
    assert [one.labels for one in read_split(tmp_path / "corpus", "valid")] == [("10",)]


def test_labels_that_look_like_numbers_are_text(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("text,label\ngood,\u00b2\nbad,--5\n", encoding="utf-8")
    assert run_prepare(tmp_path, SEQUENCES, "train.csv") == 0
    assert read_json(tmp_path / "corpus" / "account.json")["labels"]["names"] == ["--5", "\u00b2"]


def test_a_question_without_an_id_is_named_by_its_place(tmp_path: Path) -> None:
    rows = [{"id": None, "context": "Kim", "question": "Who?", "answers": []}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [one.id for one in read(tmp_path / "a.jsonl", ANSWERS)] == [f"{tmp_path}/a.jsonl:{n}" for n in (1, 2)]


def test_questions_about_a_context_are_in_one_split(tmp_path: Path) -> None:
    articles = [
        squad(*(question(f"{number}-{one}", "Kim") for one in range(5)), context=f"Kim has {number} cats.")["data"][0]
        for number in range(60)
    ]
    (tmp_path / "all.json").write_text(json.dumps({"data": articles}))
    (tmp_path / "c.yaml").write_text(YAML.format(task=ANSWERS, files="all.json", splits=""))
    assert main(["prepare", str(tmp_path / "c.yaml"), "corpus.split=70,30,0"]) == 0
    contexts = {
        split: {one.texts[1] for one in read_split(tmp_path / "corpus", split)}  # type: ignore[arg-type]
        for split in ("train", "valid")
    }
    assert len(contexts["train"]) + len(contexts["valid"]) == 60
    assert min(map(len, contexts.values())) > 5


CSV = "text,label\ngood,a\nbad,b\n"
MISTAKES = {
    "no text column": (
        SEQUENCES,
        {"train.csv": "review,label\ngood,a\n"},
        r"train\.csv:2: the field 'text' is missing; found label, review; set corpus\.text_key",
    ),
    "no label": (SEQUENCES, {"train.csv": CSV + "fine,\n"}, r"train\.csv:4: has no label"),
    "no label column": (
        SEQUENCES,
        {"train.csv": "text,class\ngood,a\n"},
        r"train\.csv:2: has no label; found the fields class, text; add it, or set corpus\.label_key",
    ),
    "too few columns": (SEQUENCES, {"train.csv": CSV + "fine\n"}, r"train\.csv:4: found 1 fields; the header has 2"),
    "unknown label": (
        SEQUENCES,
        {"train.csv": CSV, "valid.csv": "text,label\nx,a\ny,c\n"},
        r"valid\.csv:3: the valid split has the label 'c', which the train split does not .* a, b",
    ),
    "one label": (SEQUENCES, {"train.csv": "text,label\ngood,a\n"}, r"one label only, 'a'"),
    "no json": (SEQUENCES, {"train.jsonl": '{"text": "x", "label": 1}\n{"text": \n'}, r"train\.jsonl:2: not JSON"),
    "a list as label": (SEQUENCES, {"train.jsonl": '{"text": "x", "label": [1]}'}, r"jsonl:1: the label is \[1\]"),
    "a label that is no number": (SEQUENCES, {"train.jsonl": '{"text": "x", "label": NaN}'}, r"the label is nan"),
    "plain text": (SEQUENCES, {"train.txt": "good\n"}, r"train\.txt: corpus\.labels=sequence-class.* reads CSV"),
    "source code": (SEQUENCES, {"train.py": "print(1)\n"}, r"train\.py: corpus\.labels=sequence-class.* reads CSV"),
    "unequal words": (
        WORDS,
        {"train.jsonl": '{"words": ["a", "b"], "labels": ["O"]}'},
        r"train\.jsonl:1: 2 words but 1 labels; each word needs one label",
    ),
    "no words": (
        WORDS,
        {"train.jsonl": '{"text": "a b", "labels": ["O"]}'},
        r"jsonl:1: has no list of words in 'words'",
    ),
    "no label in conll": (
        WORDS,
        {"train.conll": "Kim B-PER\nlives\n"},
        r"train\.conll:2: found 1 columns, the lines before have 2",
    ),
    "no utf-8": (WORDS, {"train.conll": b"Kim B-PER\n\xff\xfe O\n"}, r"train\.conll:2: not UTF-8"),
    "wrong offset": (
        ANSWERS,
        {"train.json": json.dumps(squad(question("q1", "Seoul", 12)))},
        r"\(id q1\): the answer 'Seoul' is not at character 12 of its context, where ' Seou' is; correct",
    ),
    "wrong offset in a line": (
        ANSWERS,
        {
            "train.jsonl": json.dumps(
                {"id": "q", "context": "x", "question": "y", "answers": {"text": ["x"], "answer_start": [5]}}
            )
        },
        r"train\.jsonl:1 \(id q\): the answer 'x' is not at character 5",
    ),
    "an id twice": (
        ANSWERS,
        {"train.json": json.dumps(squad(question("q1", "Kim"), question("q1", "Kim")))},
        r"the id 'q1' occurs twice",
    ),
    "no question": (ANSWERS, {"train.json": json.dumps(squad({"id": "q1"}))}, r"qas\[0\]: has no text 'question'"),
    "no squad": (ANSWERS, {"train.json": '{"articles": []}'}, r"no list 'data\[\]'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, files, message = MISTAKES[name]
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run_prepare(tmp_path, task, *files) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error
    assert error.count("\n") == 1
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.layout=masked", r"train\.layout: found masked, but corpus\.labels=.* needs labelled"),
        ("corpus.labels=null", r"corpus\.labels: is not set, which train\.layout=labelled needs"),
        ("train.length=null", r"train\.length: is not set"),
        ("corpus.sentences=split", r"corpus\.sentences: is not applied to examples"),
        ("train.label_smoothing=0.1", r"train\.label_smoothing: cannot be used with corpus\.labels"),
    ],
)
def test_settings_that_do_not_fit(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.csv").write_text(CSV)
    (tmp_path / "c.yaml").write_text(YAML.format(task=SEQUENCES, files="train.csv", splits="train.csv: train"))
    assert main(["prepare", str(tmp_path / "c.yaml"), setting]) == 2
    assert re.search(message, capsys.readouterr().err)
