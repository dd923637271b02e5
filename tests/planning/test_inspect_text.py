"""Facts about a text from a sample: sizes, duplicates, scripts, and bytes per token of smaller vocabularies."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from textmill.cli import main
from textmill.config import CorpusConfig, TokenizerConfig
from textmill.corpus.find_sources import find_sources
from textmill.errors import TextmillError
from textmill.planning import inspect_text as inspection
from textmill.planning.inspect_text import HELD_OUT, inspect_text
from textmill.planning.probe_machine import probe_machine
from textmill.tokens.vocabulary.algorithms import PIECE_CHARACTERS
from textmill.where import open_where

SHAKESPEARE = Path(__file__).parents[2] / "textmill" / "corpora" / "tinyshakespeare.txt"


def write_documents(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents))
    return path


@pytest.mark.parametrize("spaces", [True, False])
def test_a_vocabulary_is_the_beginning_of_a_larger_one(spaces: bool, tmp_path: Path) -> None:
    """The tokenizers library fits each one directly; both need the same tokens for held-out documents."""
    threads = os.environ.get("TOKENIZERS_PARALLELISM")
    text = SHAKESPEARE.read_text(encoding="utf-8")[:200_000]
    if not spaces:  # as Chinese: letters of three bytes, no words
        text = "".join(chr(0x4E00 + ord(letter)) if letter.isalpha() else letter for letter in text.replace(" ", ""))
    documents = list(dict.fromkeys(text.split("\n\n")))
    sources = find_sources([str(write_documents(tmp_path / "a.jsonl", documents))])
    facts = inspect_text(sources, CorpusConfig(), (400, 900))
    held_out = documents[HELD_OUT - 1 :: HELD_OUT]
    for vocab in (400, 900):
        direct = Tokenizer(models.BPE())
        direct.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1, min_frequency=2, initial_alphabet=alphabet, show_progress=False
        )
        direct.train_from_iterator([one for one in documents if one not in held_out], trainer)
        tokens = sum(len(direct.encode(one).ids) + 1 for one in held_out)
        expected = sum(len(one.encode()) for one in held_out) / tokens
        assert facts.bytes_per_token[vocab] == pytest.approx(expected, rel=0.002)
    assert os.environ.get("TOKENIZERS_PARALLELISM") == threads


def test_size_duplicates_and_scripts(tmp_path: Path) -> None:
    dice = random.Random(3)
    korean = [" ".join(dice.choices("물레방아는 강가에 서 있다 아침마다".split(), k=40)) for _ in range(50)]
    facts = inspect_text(find_sources([str(write_documents(tmp_path / "a.jsonl", korean * 2))]), CorpusConfig(), (512,))
    assert facts.documents == 100
    assert facts.duplicates == pytest.approx(0.5)
    assert facts.bytes >= 2 * sum(len(text.encode()) for text in korean)
    assert list(facts.scripts) == ["Hangul"]


def test_of_a_few_huge_documents_a_part_is_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the text is counted; the vocabulary sees about as much as of many documents, and some is held out."""
    monkeypatch.setattr(inspection, "SAMPLE_BYTES", 600_000)
    text = SHAKESPEARE.read_text(encoding="utf-8")
    documents, fitted = [text, text[::-1], text[:500_000] + text], list[str]()
    fit = inspection.train_bpe_on_texts

    def fit_and_keep(texts: list[str], config: TokenizerConfig) -> Tokenizer:
        fitted.extend(texts)
        return fit(texts, config)

    monkeypatch.setattr(inspection, "train_bpe_on_texts", fit_and_keep)
    files = [str(write_documents(tmp_path / f"{number}.jsonl", [one])) for number, one in enumerate(documents)]
    facts = inspect_text(find_sources(files), CorpusConfig(), (512,))
    assert facts.documents == 3
    assert facts.bytes == pytest.approx(sum(len(one.encode()) for one in documents), rel=0.05)
    assert 0 < sum(map(len, fitted)) <= 600_000 + len(documents) * 2 * PIECE_CHARACTERS
    assert facts.bytes_per_token[512] > 1.5


ODD = {
    "one document": "Once upon a time there was a mill. " * 60,
    "all duplicates": "The same paragraph, again and again, of about one hundred characters, no more, no less.\n\n"
    * 900,
    "two kilobytes": "\n\n".join(f"Paragraph {number} of a short text." for number in range(60)),
    "one repeated line": "all work and no play\n" * 5000,
    "many scripts": "\n\n".join(chr(start + shift) * 9 for start in range(0x400, 0x3000, 97) for shift in range(20)),
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_texts_get_a_plan_that_opens(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.machines import TWO_CORES

    monkeypatch.setattr("textmill.commands.new.probe_machine", lambda: TWO_CORES)
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text(ODD[kind])
    assert main(["new", "mine", "--text", "a.txt", "--minutes", "0.5"]) == 0
    assert open_where("mine", []).config.train.minutes in (0.5, None)
    few = kind in ("one document", "all duplicates", "two kilobytes", "one repeated line")
    assert ("different document" in capsys.readouterr().err) == few


def test_binary_files_get_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(random.Random(1).randbytes(5000))
    assert main(["new", "mine", "--text", "a.jsonl"]) == 2
    assert "name files with text" in capsys.readouterr().err
    with pytest.raises(TextmillError, match="unreadable records"):
        inspect_text(find_sources(["a.jsonl"]), CorpusConfig(), (512,))


def test_unreadable_records_are_refused(tmp_path: Path) -> None:
    """A project that `run` would refuse is not written."""
    rows = [{"text": f"mill {number}"} for number in range(40)] + [{"body": "river"}] * 20
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    message = r"20 of 60 records of a sample cannot be read, so .*a\.jsonl:41: no field 'text'; found \['body'\]"
    with pytest.raises(TextmillError, match=message):
        inspect_text(find_sources([str(tmp_path / "a.jsonl")]), CorpusConfig(), (300,))


def test_two_texts_are_both_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.machines import TWO_CORES

    monkeypatch.setattr("textmill.commands.new.probe_machine", lambda: TWO_CORES)
    monkeypatch.chdir(tmp_path)
    write_documents(Path("a.jsonl"), ["one text"] * 3)
    write_documents(Path("b.jsonl"), ["another text"] * 3)
    assert main(["new", "mine", "--text", "a.jsonl", "--text", "b.jsonl"]) == 0
    assert open_where("mine", []).config.corpus.sources == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize(("text", "moved"), [("texts", "work/mine"), ("work/texts", "work")])
def test_a_moved_project_finds_its_text(text: str, moved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project with a text elsewhere, and a project that is moved together with the text next to it."""
    from tests.support.machines import TWO_CORES

    monkeypatch.setattr("textmill.commands.new.probe_machine", lambda: TWO_CORES)
    monkeypatch.chdir(tmp_path)
    Path(text).mkdir(parents=True)
    write_documents(Path(text, "a.jsonl"), [f"text {number}" for number in range(30)])
    assert main(["new", "work/mine", "--text", f"{text}/*.jsonl"]) == 0
    Path("far/away").mkdir(parents=True)
    new_place = Path(moved).rename(Path("far/away", Path(moved).name))
    assert main(["prepare", str(new_place if moved.endswith("mine") else new_place / "mine")]) == 0


def test_the_machine_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.planning.probe_machine.open_device", lambda _: torch.device("cpu"))
    facts = probe_machine()
    (small, slow), (large, fast) = facts.rates
    assert small < large
    assert 1e8 < slow < 1e14
    assert 1e8 < fast < 1e14
    assert slow <= facts.flops(1_000_000) * 1.5


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_size_of_a_file_that_is_read_in_part(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Escaped Korean takes six bytes of a file for three of text, and compression makes the file smaller."""
    dice = random.Random(5)
    syllables = [chr(0xAC00 + number) for number in range(0, 11000, 3)]
    texts = ["".join(dice.choices(syllables, k=300)) for _ in range(1500)]
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()
    pack = {"": bytes, ".gz": gzip.compress}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(lines))
    monkeypatch.setattr("textmill.planning.inspect_text.SAMPLE_BYTES", 1 << 18)
    facts = inspect_text(find_sources([str(path)]), CorpusConfig(), (512,))
    assert facts.bytes == pytest.approx(sum(len(text.encode()) for text in texts), rel=0.1)
    assert facts.documents == pytest.approx(len(texts), rel=0.1)
