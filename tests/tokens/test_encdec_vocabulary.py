"""A vocab.txt of EncDecTokenizer gives the ids of its algorithm, written out here token by token."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

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


def wanted_tokens(text: str) -> list[str]:
    """As EncDecTokenizer.tokenize, with words cut at borders of scripts."""
    found: list[str] = []
    for word in re.findall(r"[\u4e00-\u9fff]+|[A-Za-z0-9]+|[\s\S]", text):
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
