"""Files as they were published give the same questions as the data of the hub, which test_against_lm_eval.py checks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from textmill.commands.evaluate import evaluate
from textmill.config import EvaluateConfig, RunConfig
from textmill.errors import TextmillError
from textmill.evaluation.choices import Item
from textmill.evaluation.data_files import read_items
from textmill.evaluation.tasks import arc, commonsenseqa, kobest, open_tasks, piqa

KOBEST = [
    (
        {"Text": "방아가 있다.", "Question": "있나?", "Answer": "True"},
        {"paragraph": "방아가 있다.", "question": "있나?", "label": 1},
    ),
    (
        {"sentence": "비가 왔다.", "question": "결과", "1": "젖었다.", "2": "말랐다.", "Answer": "2"},
        {
            "premise": "비가 왔다.",
            "question": "결과",
            "alternative_1": "젖었다.",
            "alternative_2": "말랐다.",
            "label": 1,
        },
    ),
    (
        {
            "context": "물.",
            "choice1": "돈다.",
            "choice2": "난다.",
            "choice3": "산다.",
            "choice4": "간다.",
            "label": "3",
        },
        {
            "context": "물.",
            "ending_1": "돈다.",
            "ending_2": "난다.",
            "ending_3": "산다.",
            "ending_4": "간다.",
            "label": 3,
        },
    ),
    ({"Text": "좋아요", "Label": "1"}, {"sentence": "좋아요", "label": 1}),
    (
        {"Target": "배", "SENTENCE1": "배가 고프다.", "SENTENCE2": "배를 탔다.", "ANSWER": "False"},
        {"word": "배", "context_1": "배가 고프다.", "context_2": "배를 탔다.", "label": 0},
    ),
]
"""Rows of the published TSV files, and the same rows on the hub."""


@pytest.mark.parametrize(("published", "hub"), KOBEST)
def test_kobest_as_published(published: dict[str, str], hub: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "test.tsv"
    file.write_text("\t".join(published) + "\n" + "\t".join(published.values()) + "\n", encoding="utf-8")
    ((place, record),) = read_items(file)
    assert place == f"{file}:2"
    assert kobest.read_item(record, "place") == kobest.read_item(hub, "place")


@pytest.mark.parametrize("read", [arc.read_item, commonsenseqa.read_item])
def test_arc_and_commonsenseqa_as_published(read: Any) -> None:
    texts, labels = ["a wheel", "a wall", "a river"], ["A", "B", "C"]
    choices = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    published = {"id": "1", "question": {"stem": "What turns?", "choices": choices}, "answerKey": "C"}
    hub = {"question": "What turns?", "choices": {"text": texts, "label": labels}, "answerKey": "C"}
    found: Item = read(published, "place")
    assert found == read(hub, "place")
    assert found.answer == 2


def test_arc_with_numbers_as_labels() -> None:
    choices = [{"text": "a wheel", "label": "1"}, {"text": "a wall", "label": "2"}]
    item = arc.read_item({"question": {"stem": "What turns?", "choices": choices}, "answerKey": "2"}, "place")
    assert item.answer == 1


def test_piqa_with_its_file_of_labels(config: RunConfig, tmp_path: Path) -> None:
    """Answers in the file of labels give the figures of answers in the records."""
    records = [{"goal": f"the mill {n}", "sol1": "turns", "sol2": "stands by a river"} for n in range(4)]
    labels = [0, 1, 1, 0]
    for name, lines in (("valid", records), ("own", [{**r, "label": n} for r, n in zip(records, labels, strict=True)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    (tmp_path / "valid-labels.lst").write_text("\n".join(map(str, labels)) + "\n")
    tasks = EvaluateConfig(tasks=[f"piqa:{tmp_path / 'valid.jsonl'}", f"piqa:{tmp_path / 'own.jsonl'}"])
    result = evaluate(config.model_copy(update={"evaluate": tasks}))
    figures = [
        {key: result[f"piqa-{name}"][key] for key in ("acc", "acc_norm", "bits_per_byte")} for name in ("valid", "own")
    ]
    assert figures[0] == figures[1]
    (tmp_path / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(TextmillError, match=r"valid-labels.lst: has 2 labels, .* has 4 items"):
        evaluate(config.model_copy(update={"evaluate": tasks}))


def test_a_piqa_item_without_an_answer_is_an_error() -> None:
    with pytest.raises(TextmillError, match="the answer is None"):
        piqa.read_item({"goal": "a", "sol1": "b", "sol2": "c"}, "place")


def test_parquet_json_and_csv_have_the_same_records(tmp_path: Path) -> None:
    records = [{"goal": "the mill, old", "sol1": "turns"}, {"goal": "물레방아", "sol1": 'says "so"'}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(records), encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n\n".join(map(json.dumps, records)), encoding="utf-8")
    (tmp_path / "a.csv").write_text('goal,sol1\n"the mill, old",turns\n물레방아,"says ""so"""\n', encoding="utf-8")
    for name in ("a.parquet", "a.json", "a.jsonl", "a.csv"):
        assert [record for _, record in read_items(tmp_path / name)] == records, name


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"PAR1 not", "not readable as Parquet"),
        ("a.tsv", b"a\tb\n1\n", ":2: has another number of columns"),
        ("a.txt", b"a", "found a '.txt' file; evaluation data is .jsonl"),
        ("a.json", b"[1]", "item 1: found a int"),
    ],
)
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextmillError) as error:
        list(read_items(tmp_path / name))
    assert message in str(error.value)


def test_lm_eval_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.evaluation.tasks.find_spec", lambda _: None)
    monkeypatch.delitem(sys.modules, "textmill.evaluation.lm_eval_adapter", raising=False)
    with pytest.raises(TextmillError, match=r"needs lm-eval; run: pip install 'textmill\[eval\]'"):
        open_tasks(["lm-eval:arc_easy"])
