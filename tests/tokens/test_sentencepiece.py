"""A sentencepiece model opens without that library and gives the same ids."""

from __future__ import annotations

import io
import json
import lzma
import random
from pathlib import Path
from typing import Any

import pytest

from textmill.cli import main
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.sentencepiece_model import parse_model
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer
from textmill.where import PACKAGE

sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece: pip install 'textmill[dev]'")

MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "t5": {"model_type": "unigram", "byte_fallback": True, "character_coverage": 0.98, "pad_id": 3},
    "plain": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
    },
    "crossing": {"model_type": "unigram", "split_by_whitespace": False},
    "bpe": {
        "model_type": "bpe",
        "normalization_rule_name": "nmt_nfkc_cf",
        "unk_id": 3,
        "bos_id": 0,
        "eos_id": 1,
        "pad_id": 2,
    },
    "llama": {
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 0.98,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
    "user": {"model_type": "bpe", "user_defined_symbols": ["<usr>"]},
}
FOREIGN = [
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 돌기 시작한다.",
    "Değirmen ırmağın kıyısında duruyor. Çocuk çuvalları sayar.",
    "天地玄黃，宇宙洪荒。日月盈昃。",
]
TRICKY = [
    "",
    " ",
    "  two  spaces ",
    "tab\there\nnewline",
    "emoji 🙂👩‍👩‍👧",
    "é e\u0301 ﬁ ① Ａ",
    "<s> </s> <unk> <0x41> x",
    "a\u00a0b\u3000c",
    "▁under ▁▁",
    "\u200b\u200d",
    "x" * 3000,
    " lead",
    "ＡＢＣ　ｶｷ",
    "한글 각 1483",
    "İstanbul ıİ",
    "\x01 control",
]


@pytest.fixture(scope="module")
def lines() -> list[str]:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:60_000]
    return [line for line in text.split("\n") if line] + FOREIGN * 20


@pytest.fixture(scope="module", params=MODELS)
def pair(
    request: pytest.FixtureRequest, lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, TextTokenizer, Any, Path]:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        vocab_size=900,
        minloglevel=2,
        num_threads=1,
        hard_vocab_limit=False,
        **MODELS[request.param],
    )
    path = tmp_path_factory.mktemp("spm") / "m.model"
    path.write_bytes(written.getvalue())
    return request.param, open_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path)), path


def check_ids(ours: TextTokenizer, theirs: Any, text: str) -> bool:
    """Whether the ids are equal; other ids must have the same score and text.

    Two pieces in either order score the same, and then the rounding of 32-bit or 64-bit sums chooses. How often that
    happens depends on the scores, which the processor's own rounding changes when the model is trained.
    """
    mine, wanted = ours.encode(text), theirs.encode(text)
    if mine == wanted:
        return True
    assert sum(map(theirs.get_score, mine)) == pytest.approx(sum(map(theirs.get_score, wanted)), abs=1e-4), text
    assert theirs.decode(mine) == theirs.decode(wanted)
    return False


def test_the_same_ids_and_text(pair: tuple[str, TextTokenizer, Any, Path], lines: list[str]) -> None:
    _, ours, theirs, _ = pair
    texts = [*lines[::7], *FOREIGN, *TRICKY]
    assert sum(check_ids(ours, theirs, text) for text in texts) >= 0.95 * len(texts)
    for text in texts:
        ids = theirs.encode(text)
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids)


def test_the_same_special_tokens(pair: tuple[str, TextTokenizer, Any, Path], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    name, ours, theirs, path = pair
    pad = None if theirs.pad_id() < 0 else theirs.pad_id()
    assert (ours.vocab, ours.eos_id, ours.bos_id, ours.unk_id, ours.pad_id) == (
        len(theirs),
        theirs.eos_id(),
        theirs.bos_id(),
        theirs.unk_id(),
        pad,
    )
    ours.save(tmp_path)
    assert open_tokenizer(tmp_path).fingerprint == open_tokenizer(path.parent).fingerprint == ours.fingerprint
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in (FOREIGN[0], "Now is the winter", "hello<usr>there"):
        assert again(text, add_special_tokens=False).input_ids == ours.encode(text) == theirs.encode(text)
    assert name != "user" or theirs.piece_to_id("<usr>") in ours.encode("hello<usr>there")


@pytest.mark.long
def test_the_same_ids_on_real_text(shared_data: Path, pair: tuple[str, TextTokenizer, Any, Path]) -> None:
    _, ours, theirs, _ = pair
    for language in ("en", "ko", "tr", "zh"):
        with lzma.open(shared_data / f"{language}.jsonl.xz", "rt", encoding="utf-8") as stream:
            lines = [line for _ in range(60) for line in json.loads(next(stream))["text"].split("\n")][:1500]
        assert sum(check_ids(ours, theirs, line) for line in lines) >= 0.95 * len(lines)


def test_fields_against_the_library(pair: tuple[str, TextTokenizer, Any, Path]) -> None:
    _, _, theirs, path = pair
    model = parse_model(path.read_bytes())
    assert [piece.text for piece in model.pieces] == [theirs.id_to_piece(id_) for id_ in range(len(theirs))]
    assert [piece.score for piece in model.pieces] == [theirs.get_score(id_) for id_ in range(len(theirs))]


def test_a_damaged_model_is_an_error(pair: tuple[str, TextTokenizer, Any, Path], tmp_path: Path) -> None:
    raw, path = pair[3].read_bytes(), tmp_path / "m.model"
    dice, refused = random.Random(pair[0]), 0
    for _ in range(60):
        cut = dice.randrange(len(raw))
        path.write_bytes(raw[:cut] + (dice.randbytes(dice.randint(1, 9)) + raw[cut:] if dice.random() < 0.5 else b""))
        try:
            open_tokenizer(path).encode("any text")
        except TextmillError:  # anything else would be a traceback
            refused += 1
    assert refused > 20


def test_unsupported_models_are_an_error(lines: list[str], tmp_path: Path) -> None:
    for kind in ("word", "char"):
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=written,
            vocab_size=100,
            minloglevel=2,
            hard_vocab_limit=False,
            model_type=kind,
        )
        (tmp_path / "m.model").write_bytes(written.getvalue())
        with pytest.raises(TextmillError, match="model type"):
            open_tokenizer(tmp_path)


@pytest.mark.parametrize("settings", [["tokenizer.kind=unigram"], ["tokenizer.kind=bpe"], ["tokenizer.use=mine.model"]])
def test_bert_gets_the_tokens_it_needs(
    settings: list[str], tmp_path: Path, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [line for path in sorted(tiny_texts.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]
    with io.BytesIO() as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=300, hard_vocab_limit=False, minloglevel=2
        )
        Path("mine.model").write_bytes(model.getvalue())
    assert "<mask>" not in {piece.text for piece in parse_model(Path("mine.model").read_bytes()).pieces}
    Path("bert.yaml").write_text(
        "corpus: {sources: [texts], section_chars: 200, sentences: split, split: '80,20'}\n"
        "tokenizer: {vocab: 400}\ntokens: {level: sentence, append_end: false}\n"
        "model: {family: bert, size: tiny, shape: {layers: 1, heads: 2, width: 16}}\n"
        "train: {layout: masked, length: 32, batch: 4, steps: 2}\nengine: {device: cpu}\nsample: {prompt: ''}\n"
    )
    for stage in ("prepare", "fit-tokenizer", "tokenize", "train"):
        assert main([stage, "bert.yaml", *settings]) == 0, stage
    found = open_tokenizer(tmp_path / "runs" / "bert" / "tokenizer")
    assert found.mask_id is not None
    assert found.cls_id is not None
    assert found.decode([found.mask_id]) == "<mask>"
    (checkpoint,) = (tmp_path / "runs" / "bert" / "run").glob("step-*2")
    assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] == found.vocab > found.mask_id
