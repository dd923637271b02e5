"""Tokenizers written for other tools: their own readers give our ids for texts in many scripts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer

from tests.support.model_folders import korean_tokenizer, write_folder
from textmill.cli import main
from textmill.config import TokenizerConfig
from textmill.conversion.compare import TEXTS
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit, open_tokenizer
from textmill.where import PACKAGE

MORE_UNIGRAM: list[dict[str, Any]] = [{"split_digits": True}, {"byte_fallback": False, "character_coverage": 1.0}]
TRICKY = [
    "",
    " ",
    "  two  spaces ",
    "tab\there\nnewline\n\n",
    "emoji 🙂👩‍👩‍👧",
    "<s> </s> <unk> <0x41> x",
    "a\u00a0b\u3000c",
    "▁under ▁▁",
    "x" * 300,
    " lead",
    "한글 각 1483",
    "İstanbul ıİ",
    "don't, 12,345!",
    "ＡＢＣ　ｶｷ",
    "天地玄黃，宇宙洪荒。",
]


def lines() -> list[str]:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:100_000]
    return [line for line in text.split("\n") if line] + [*TEXTS] * 20


def many_texts() -> list[str]:
    """Lines of all scripts, cut and joined at random places."""
    dice, source = random.Random(4), lines()
    picked = [
        "".join(dice.choice(source)[dice.randrange(8) :] + dice.choice(["", " ", "\n"]) for _ in range(3))
        for _ in range(150)
    ]
    return [*TEXTS, *TRICKY, *picked]


def exported(tmp_path: Path, **settings: Any) -> tuple[TextTokenizer, Path]:
    tokenizer = fit(iter([lines()]), TokenizerConfig(vocab=1500, **settings))
    source = write_folder(tmp_path / "source", tokenizer)
    assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=tokenizer"]) == 0
    assert main(["check", str(tmp_path / "out")]) == 0
    return tokenizer, tmp_path / "out"


@pytest.mark.parametrize("lowercase", [False, pytest.param(True, marks=pytest.mark.long)])
def test_vocab_txt_in_transformers_and_tokenizers(tmp_path: Path, lowercase: bool) -> None:
    tokenizer, out = exported(tmp_path, kind="wordpiece", lowercase=lowercase, split_cjk=not lowercase)
    assert {path.name for path in out.iterdir()} == {"vocab.txt", "tokenizer_config.json", "manifest.json"}
    theirs, auto = BertTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    rules = {"lowercase": lowercase, "strip_accents": False, "handle_chinese_chars": not lowercase}
    plain = BertWordPieceTokenizer(str(out / "vocab.txt"), **rules)
    for text in many_texts():
        ids = tokenizer.encode(text)
        if "[" not in text:
            assert theirs(text, add_special_tokens=False).input_ids == ids
            assert auto(text, add_special_tokens=False).input_ids == ids
        assert plain.encode(text, add_special_tokens=False).ids == ids
    assert theirs("mill").input_ids == [theirs.cls_token_id, *tokenizer.encode("mill"), theirs.sep_token_id]


@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.long), {"chat": "default"}])
def test_gpt2_files_in_transformers_and_tokenizers(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokenizer, out = exported(tmp_path, kind="bpe", **settings)
    theirs, auto = GPT2Tokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    plain = ByteLevelBPETokenizer(str(out / "vocab.json"), str(out / "merges.txt"))
    for text in many_texts():
        assert theirs(text).input_ids == auto(text).input_ids == plain.encode(text).ids == tokenizer.encode(text)
    assert theirs.eos_token_id == tokenizer.eos_id
    talk = [{"role": "user", "content": "왜?"}]
    if settings:
        assert auto.apply_chat_template(talk, tokenize=False) == "<|user|>왜?<|endoftext|>"
        assert theirs("<|user|>").input_ids == [tokenizer.inner.token_to_id("<|user|>")]


@pytest.mark.parametrize("settings", [{}, *(pytest.param(one, marks=pytest.mark.long) for one in MORE_UNIGRAM)])
def test_sentencepiece_files_in_sentencepiece(tmp_path: Path, settings: dict[str, Any]) -> None:
    tokenizer, out = exported(tmp_path, kind="unigram", **settings)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(out / "tokenizer.model"))
    assert theirs.get_piece_size() == tokenizer.vocab
    assert (theirs.unk_id(), theirs.bos_id(), theirs.eos_id(), theirs.pad_id()) == (
        tokenizer.unk_id,
        tokenizer.bos_id,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    assert [line.split("\t")[0] for line in (out / "tokenizer.vocab").read_text("utf-8").split("\n")[:4]] == [
        "<unk>",
        "<s>",
        "</s>",
        "<pad>",
    ]
    texts = many_texts() if not settings.get("byte_fallback", True) else [*many_texts(), "Значок ѫ 🙂🙂"]
    known = [text for text in texts if tokenizer.unk_id not in tokenizer.encode(text)]
    assert len(known) > 50
    for text in known:
        assert theirs.encode(text) == tokenizer.encode(text)
        assert theirs.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))


@pytest.mark.parametrize("kind", [pytest.param("unigram", marks=pytest.mark.long), "bpe"])
def test_a_sentencepiece_model_comes_back(tmp_path: Path, kind: str) -> None:
    rules: dict[str, Any] = {"model_type": kind, "vocab_size": 1100, "character_coverage": 1.0, "byte_fallback": True}
    prefix = tmp_path / "theirs"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines()), model_prefix=str(prefix), minloglevel=2, num_threads=1, **rules
    )
    source = write_folder(tmp_path / "source", open_tokenizer(Path(f"{prefix}.model")))
    assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=tokenizer"]) == 0
    before = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    after = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out" / "tokenizer.model"))
    assert [before.id_to_piece(id_) for id_ in range(1100)] == [after.id_to_piece(id_) for id_ in range(1100)]
    for text in many_texts():
        assert after.encode(text) == before.encode(text)


def test_what_the_files_cannot_hold_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"kind": "wordpiece", "split_digits": True}, "a vocab.txt has no place for tokenizer.split_digits"),
        ({"kind": "bpe", "split_digits": True}, "no place for a normalizer or another way to split than GPT-2's"),
        ({"kind": "unigram", "lowercase": True}, "has no place for the normalizer Lowercase"),
    ]
    for number, (settings, message) in enumerate(cases):
        tokenizer = fit(iter([[*TEXTS] * 3]), TokenizerConfig(vocab=800, **settings))
        source = write_folder(tmp_path / f"source{number}", tokenizer)
        assert main(["export", str(source), f"export.folder={tmp_path / 'out'}", "export.kind=tokenizer"]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_of_a_tokenizer_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(TEXTS * 9), encoding="utf-8")
    (tmp_path / "my.yaml").write_text("corpus: {sources: [text.txt], dedup: none}\ntokenizer: {vocab: 400}\n")
    where = [str(tmp_path / "my.yaml"), f"folder={tmp_path / 'mine'}", "tokenizer.fit_on=sources"]
    assert main(["fit-tokenizer", *where, "runner.workers=1"]) == 0
    export = ["export", str(tmp_path / "mine" / "tokenizer"), f"export.folder={tmp_path / 'out'}"]
    assert main([*export, "export.kind=tokenizer"]) == 0
    assert len(json.loads((tmp_path / "out" / "vocab.json").read_text("utf-8"))) == 400
    assert main([*export, "export.kind=tokenizer"]) == 0
    assert "export: done already" in capsys.readouterr().out


def test_of_a_model_folder_inside_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's own tokenizer is written, not the one that the current folder happens to have."""
    other = fit(iter([["a text of other words"] * 9]), TokenizerConfig(vocab=262))
    (tmp_path / "tokenizer").mkdir()
    other.save(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "manifest.json").write_text("{}")
    write_folder(tmp_path / "model", tokenizer := korean_tokenizer())
    monkeypatch.chdir(tmp_path)
    assert main(["export", "model", "export.kind=tokenizer", "export.folder=out"]) == 0, capsys.readouterr().err
    assert open_tokenizer(tmp_path / "out").vocab == tokenizer.vocab != other.vocab
    assert main(["export", "model", "export.kind=tokenizer", "export.folder=two", "export.precision=bf16"]) == 2
    assert "export.precision: a tokenizer has none" in capsys.readouterr().err
