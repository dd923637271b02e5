"""Documents that share n-grams with evaluation data are dropped or marked; the rule is that of plain Python."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from textmill.commands.evaluate import evaluate
from textmill.commands.prepare import prepare
from textmill.config import EvaluateConfig, RunConfig
from textmill.corpus import decontamination
from textmill.corpus.decontamination import NgramIndex, word_hashes
from textmill.corpus.dropped import read_dropped
from textmill.errors import TextmillError
from textmill.evaluation.measured_task import describe_corpus
from textmill.storage.files import hash_file, read_json

SECRET = "The miller who lives beside the old stone bridge sold his last sack of flour to a stranger today"
SHORT = "Seven tall towers stand above a silent village"
HARMLESS = "Nothing of this has been seen in any examination that a model could be asked to pass."


def keys_of(text: str, n: int, least: int) -> set[tuple[str, ...]]:
    """Megatron-LM's keys of one evaluation text."""
    words = re.findall(r"\w+", text.lower())
    if len(words) < n:
        return {tuple(words)} if len(words) >= least else set()
    return {tuple(words[start : start + n]) for start in range(len(words) - n + 1)}


def contaminated(documents: Sequence[str], evaluation: Sequence[str], *, n: int, least: int, common: int) -> list[bool]:
    """The rule in plain Python: sets of tuples of words."""
    keys = set().union(*(keys_of(text, n, least) for text in evaluation))
    found = []
    for document in documents:
        words = re.findall(r"\w+", document.lower())
        runs = {tuple(words[a : a + size]) for size in range(least, n + 1) for a in range(len(words) - size + 1)}
        found.append(runs & keys)
    counts = Counter(key for hits in found for key in hits)
    return [any(not common or counts[key] < common for key in hits) for hits in found]


def write_lines(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def config_of(folder: Path, documents: Sequence[str], entries: Sequence[str], **settings: Any) -> RunConfig:
    source = write_lines(folder / "documents.jsonl", [{"text": text} for text in documents])
    corpus = {"sources": [str(source)], "dedup": "none", "split": [1], "decontaminate": list(entries), **settings}
    return RunConfig.model_validate({"folder": str(folder), "corpus": corpus, "runner": {"workers": 1}})


def kept(folder: Path) -> list[str]:
    return [text for path in sorted(folder.glob("train-*.parquet")) for text in pq.read_table(path)["text"].to_pylist()]


@pytest.mark.parametrize(("n", "least", "common"), [(13, 8, 10), (13, 13, 0), (8, 8, 3), (4, 2, 2), (5, 3, 0)])
def test_the_dropped_documents_are_those_of_plain_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n: int, least: int, common: int
) -> None:
    """Few different words, so that n-grams occur often by chance; punctuation, case and scripts vary."""
    dice = random.Random(n)
    words = ["mill", "Wheel,", "river's", "_x_", "naïve", "ÇARK", "강가에", "(42)", "don't"][: 3 if n > 5 else 9]

    def text(least_words: int, most: int) -> str:
        return " ".join(dice.choices(words, k=dice.randint(least_words, most))) + "."

    evaluation = [text(1, 3 * n) for _ in range(12)]
    documents = [text(1, 6 * n) for _ in range(60)]
    data = write_lines(tmp_path / "lambada.jsonl", [{"text": one} for one in evaluation])
    monkeypatch.setattr(decontamination, "NGRAM_WORDS", n)
    monkeypatch.setattr(decontamination, "MIN_WORDS", least)
    monkeypatch.setattr(decontamination, "COMMON_DOCUMENTS", common or len(documents) + 1)
    config = config_of(tmp_path, documents, [str(data)])
    wanted = contaminated(documents, evaluation, n=n, least=least, common=common)
    assert any(wanted)
    assert not all(wanted)
    folder = prepare(config)
    assert kept(folder) == [one for one, is_hit in zip(documents, wanted, strict=True) if not is_hit]
    assert read_json(folder / "account.json")["dropped"] == {"contaminated": sum(wanted)}


def test_characters_without_spaces_are_words() -> None:
    hashes, counts = word_hashes(["물레 방아", "水车 turns", ""])
    assert counts.tolist() == [2, 3, 0]
    assert len(set(hashes.tolist())) == 5
    assert word_hashes(["Turns!"])[0].tolist() == hashes[4:].tolist()


def test_an_n_gram_across_two_documents_is_none() -> None:
    index = NgramIndex(*_keys("one two three four"))
    assert index.find(["zero one two three four five"])[0].tolist() == [0]
    assert index.find(["one two", "three four"])[0].tolist() == []
    assert index.find([])[0].tolist() == []


def _keys(text: str) -> tuple[Any, Any]:
    from textmill.corpus.decontamination import text_keys

    (length, keys, _), *_ = text_keys([text], 4, 4)
    return keys, (keys * 0 + length).astype("uint8")


ENTRIES = {
    "lambada": [{"text": SECRET}],
    "choices": [{"context": SECRET.rpartition(" of ")[0], "choices": ["of flour to a stranger", "away"], "answer": 1}],
    "pairs": [{"sentence_good": SECRET, "sentence_bad": "His sack last sold"}],
    "hellaswag": [
        {"activity_label": "Milling", "ctx_a": SECRET, "ctx_b": "he", "endings": ["a", "b", "c", "d"], "label": 0}
    ],
    "piqa": [{"goal": SECRET, "sol1": "yes", "sol2": "no"}],
    "arc": [{"question": {"stem": SHORT, "choices": [{"text": t, "label": t} for t in "AB"]}, "answerKey": "A"}],
}


@pytest.mark.parametrize("task", [*ENTRIES, "wikitext", "text"])
def test_each_task_finds_its_examples(tmp_path: Path, task: str) -> None:
    if task in ENTRIES:
        entry = f"{task}:{write_lines(tmp_path / 'data.jsonl', ENTRIES[task])}"
    else:
        (tmp_path / "data.txt").write_text(f" = Mill = \n\n {SECRET.replace(' sack', ' sack @-@')} .\n")
        entry = str(tmp_path / "data.txt") if task == "text" else f"{task}:{tmp_path / 'data.txt'}"
    secret = SHORT if task == "arc" else SECRET
    config = config_of(tmp_path, [HARMLESS, f"Once: {secret.upper()}!", HARMLESS + " Indeed."], [entry])
    folder = prepare(config)
    assert kept(folder) == [HARMLESS, HARMLESS + " Indeed."]
    found = read_json(folder / "account.json")["contamination"]
    assert found == {Path(entry.rpartition(":")[2]).name: {"examples": 1, "too_short": 0, "found": 1, "documents": 1}}


def test_dropped_documents_are_listed(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"text": SECRET}, {"text": "too short"}])
    config = config_of(tmp_path, [HARMLESS, SECRET], [str(data)], keep_dropped=True)
    folder = prepare(config)
    (found,) = read_json(folder / "account.json")["contamination"].values()
    assert found == {"examples": 2, "too_short": 1, "found": 1, "documents": 1}
    assert [(row["rule"], row["text"]) for row in read_dropped(folder)] == [("contaminated", SECRET)]
    modified = (folder / "manifest.json").stat().st_mtime_ns
    prepare(config)
    assert (folder / "manifest.json").stat().st_mtime_ns == modified, "done already"
    write_lines(data, [{"text": SECRET + " again"}])
    with pytest.raises(TextmillError, match=r"made from other settings or inputs: corpus\.decontaminate was"):
        prepare(config)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("nowhere.txt", r"corpus\.decontaminate: .*nowhere\.txt: no such file"),
        ("lambada:nowhere.jsonl", r"nowhere\.jsonl: no such file"),
        ("yes.txt", r"yes\.txt: no text has 8 words or more"),
        ("bad.yaml", r"names no file of examples"),
    ],
)
def test_mistakes_end_prepare_and_leave_nothing(tmp_path: Path, entry: str, message: str) -> None:
    (tmp_path / "yes.txt").write_text("yes\n")
    (tmp_path / "bad.yaml").write_text("task: perplexity\n")
    name, colon, file = entry.rpartition(":")
    with pytest.raises(TextmillError, match=message):
        prepare(config_of(tmp_path, [HARMLESS], [f"{name}{colon}{tmp_path / file}"]))
    assert not (tmp_path / "corpus").exists()


def test_the_card_says_whether_the_corpus_was_checked(config: RunConfig, tmp_path: Path) -> None:
    """The corpus that the model was trained on is checked for one of two files."""
    names = ("checked", "other")
    files = [write_lines(tmp_path / f"{name}.jsonl", [{"text": f"{SECRET} {name}"}]) for name in names]
    tasks = EvaluateConfig(tasks=[f"lambada:{file}" for file in files], batch=4)
    result = evaluate(config.model_copy(update={"evaluate": tasks}))
    unknown = "unknown: there is no corpus next to the model"
    assert [result[f"lambada-{name}"]["card"]["training_data"] for name in names] == [unknown] * 2
    corpus = config_of(tmp_path, [HARMLESS, SECRET], [f"lambada:{files[0]}"])
    trained_on = read_json(prepare(corpus) / "manifest.json")["fingerprint"]
    folder = corpus.folder_of("corpus")
    tokens = corpus.folder_of("tokens")
    tokens.mkdir()
    (tokens / "manifest.json").write_text(json.dumps({"fingerprint": "ids", "made_from": {"corpus": trained_on}}))
    sums = [hash_file(file) for file in files]
    assert [describe_corpus(folder, tokens, one, {"made_from": {"tokens": "ids"}}) for one in sums] == [
        "checked for this file: 1 document dropped",
        "not checked for this file: corpus.decontaminate does not name it",
    ]
    again = "unknown: corpus or tokens were made again after training"
    assert describe_corpus(folder, tokens, sums[0], {"made_from": {"tokens": "others"}}) == again
    (tokens / "manifest.json").write_text(json.dumps({"fingerprint": "ids", "made_from": {"corpus": "another"}}))
    assert describe_corpus(folder, tokens, sums[0], {"made_from": {"tokens": "ids"}}) == again


def test_counts_of_files_with_the_same_examples_and_the_same_name(tmp_path: Path) -> None:
    """Every file and every example that shares an n-gram counts, not only the first."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "test.jsonl", [{"text": SECRET}, {"text": f"{SECRET} and then he slept"}])
    entries = [f"lambada:{tmp_path / name / 'test.jsonl'}" for name in ("one", "two")]
    folder = prepare(config_of(tmp_path, [HARMLESS, SECRET], entries))
    found = read_json(folder / "account.json")["contamination"]
    each = {"examples": 2, "too_short": 0, "found": 2, "documents": 1}
    assert found == {"test.jsonl (1)": each, "test.jsonl (2)": each}


def test_another_way_to_read_the_same_file_is_another_corpus(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", [{"text": SECRET}])
    config = config_of(tmp_path, [HARMLESS, SECRET], [f"lambada:{data}"])
    prepare(config)
    other = config.model_copy(update={"corpus": config.corpus.model_copy(update={"decontaminate": [str(data)]})})
    with pytest.raises(TextmillError, match=r"corpus\.decontaminate was"):
        prepare(other)
