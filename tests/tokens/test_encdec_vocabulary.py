"""A vocab.txt of EncDecTokenizer gives the ids of its algorithm, written out here token by token."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import jieba
import pytest

from textmill.config import TokenizerConfig
from textmill.errors import TextmillError
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer, open_used

SPECIAL = ["<unk>", "<s>", "</s>", "\u2583", "<sep>", "<pad>", "<mask>", "<eod>", "中", "国", "\u2582"]
PIECES = [
    "人",
    "民",
    "中国",
    "中国人",
    "人民",
    "水",
    "车",
    "磨坊",
    "磨",
    "T恤",
    "恤",
    "，",
    "。",
    "!",
    ",",
    ".",
    "##中",
    "#",
]
WORDS = ["the", "mill", "##ing", "##ll", "19", "##84"]
LETTERS = "abcdefghijklmnopqrstuvwxyzT0123456789"
VOCAB = [
    *SPECIAL,
    *PIECES,
    *WORDS,
    *LETTERS,
    *(f"##{letter}" for letter in LETTERS),
    "<s_0>",
    "<s_1>",
    "[SEP]",
    "[PAD]",
    "[MASK]",
    "[EOS]",
    "[BOS]",
]


def is_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def cut_scripts(text: str) -> list[str]:
    """The words of a text, cut where the script changes."""
    return re.findall(r"[\u4e00-\u9fff]+|[A-Za-z0-9]+|[\s\S]", text)


def wanted_tokens(text: str, cut: Callable[[str], Iterable[str]] = cut_scripts) -> list[str]:
    """As EncDecTokenizer.tokenize, which cuts with jieba."""
    found: list[str] = []
    for word in cut(text):
        word = word.replace(" ", "\u2582").replace("\n", "\u2583")
        if len(word) > 200:
            found.append("<unk>")
            continue
        start = 0
        while start < len(word):
            end = len(word)
            while end > start:
                part = word[start:end]
                part = part if is_chinese(part) or start == 0 else f"##{part}"
                if part in VOCAB:
                    break
                end -= 1
            found.append(part if end > start else "<unk>")
            start = max(end, start + 1)
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = tmp_path_factory.mktemp("yuan") / "vocab.txt"
    path.write_text("\n".join(VOCAB), encoding="utf-8")
    return open_tokenizer(path)


def test_ids_are_those_of_the_algorithm(tokenizer: TextTokenizer) -> None:
    dice = random.Random(3)
    parts = [
        "中国人民",
        "水车",
        "磨坊",
        "the milling",
        "1984年",
        "  ",
        "\n",
        "，",
        "!",
        "é",
        "## x",
        "龘",
        "mill",
        "<s>",
    ]
    texts = ["", " ", "中国 mill\n", "the mill, 1984。", "a" * 201, "磨龘坊", "#中", "T恤"]
    texts += ["".join(dice.choices(parts, k=6)) for _ in range(300)]
    for text in texts:
        assert tokenizer.encode(text) == [VOCAB.index(token) for token in wanted_tokens(text)], text
    known = [text for text in texts if 0 not in tokenizer.encode(text)]
    assert len(known) > 30
    assert [tokenizer.decode(tokenizer.encode(text)) for text in known] == known


def test_ids_of_jieba_are_those_of_the_algorithm(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """Also of words in which scripts meet, and of characters without a token inside of words."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    config = TokenizerConfig(use=str(tmp_path / "vocab.txt"), jieba=True)
    cut = open_used(config, "packed")
    dice = random.Random(4)
    parts = ["中国人民", "水车", "T恤", "磨龘坊", "the milling", "1984年", "  ", "\n", "，", "é", "B超", "mill", "AA制"]
    texts = ["", "\t", "a" * 201, "中国人民的水车", *("".join(dice.choices(parts, k=6)) for _ in range(200))]
    for text in texts:
        wanted = [VOCAB.index(token) for token in wanted_tokens(text, jieba.cut)]
        assert cut.encode(text) == wanted, text
    assert [ids.tolist() for ids in cut.encode_many(texts)] == [cut.encode(text) for text in texts]
    assert any(cut.encode(text) != tokenizer.encode(text) for text in texts)
    assert cut.fingerprint != tokenizer.fingerprint
    (tmp_path / "saved").mkdir()
    cut.save(tmp_path / "saved")
    again = open_tokenizer(tmp_path / "saved")
    assert again.fingerprint == cut.fingerprint
    assert again.encode(texts[-1]) == cut.encode(texts[-1])


def test_jieba_is_for_this_vocabulary_only(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nmill\n")
    with pytest.raises(TextmillError, match=r"tokenizer\.jieba: is for tokenizer\.use=vocab\.txt of EncDecTokenizer"):
        open_used(TokenizerConfig(use=str(tmp_path / "vocab.txt"), jieba=True), "packed")
    with pytest.raises(TextmillError, match=r"tokenizer\.jieba: is for tokenizer\.use"):
        TokenizerConfig(jieba=True)


def test_special_tokens_and_the_saved_folder(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    assert tokenizer.vocab == len(VOCAB)
    assert (tokenizer.unk_id, tokenizer.pad_id, tokenizer.eos_id) == (0, 5, len(VOCAB) - 1)
    tokenizer.save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    text = "中国人民的 mill,\n1984"
    assert again.encode(text) == tokenizer.encode(text)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer.encode(text)
