"""The filter that is trained on good and bad samples: it is judged on documents that it has not seen."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from textmill.config import RunConfig
from textmill.corpus.clean.quality import is_like_good, train_quality
from textmill.corpus.find_sources import bundled_corpora
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError

DICE = random.Random(5)


def passages() -> list[str]:
    """In random order, since neighbours have the same people and places, which would separate the samples."""
    text = bundled_corpora()["tinyshakespeare"].read_text(encoding="utf-8")
    found = [text[start : start + 600] for start in range(0, 600_000, 600)]
    random.Random(1).shuffle(found)
    return found


def shuffled(text: str) -> str:
    words = text.split()
    DICE.shuffle(words)
    return " ".join(words)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(path)


def config_of(folder: Path, **corpus: Any) -> RunConfig:
    return RunConfig.model_validate({"folder": str(folder / "my"), "corpus": corpus, "runner": {"workers": 2}})


def test_only_documents_like_the_good_ones_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = passages()
    bad = [shuffled(text) for text in good]
    samples = {
        "quality_good": [write(tmp_path / "good.jsonl", good[:400])],
        "quality_bad": [write(tmp_path / "bad.jsonl", bad[400:800])],
    }
    unseen = {"good": good[800:], "bad": bad[800:]}
    sources = [write(tmp_path / f"my-{name}.jsonl", texts) for name, texts in unseen.items()]
    folder = prepare(config_of(tmp_path, sources=sources, keep_fields=[], **samples))
    account = json.loads((folder / "account.json").read_text(encoding="utf-8"))
    kept = [Path(document.source).name for document in open_corpus(folder)]
    assert account["dropped"] == {"quality": 400 - len(kept)}
    assert kept.count("my-good.jsonl") >= 190
    assert kept.count("my-bad.jsonl") <= 10
    # What is printed about held-out samples is true of these documents too.
    printed = capsys.readouterr().out
    found = re.search(r"of 160 held-out samples .*precision ([\d.]+)% \(\d+ of \d+ kept samples are good\)", printed)
    assert found
    assert abs(float(found[1]) / 100 - kept.count("my-good.jsonl") / len(kept)) < 0.1
    assert account["quality"]["samples"] == 160
    # The same samples: nothing to do. Others: another result.
    prepare(config_of(tmp_path, sources=sources, **samples))
    assert "done already" in capsys.readouterr().out
    write(tmp_path / "bad.jsonl", bad[350:750])
    with pytest.raises(TextmillError, match="quality_bad"):
        prepare(config_of(tmp_path, sources=sources, **samples))


def test_samples_that_do_not_differ_are_judged_at_random() -> None:
    texts = passages()
    weights, figures = train_quality(texts[0:300:2], texts[1:300:2])
    assert 0.2 < figures.right / figures.samples < 0.8
    assert is_like_good(weights, "") in (True, False)


def test_settings_that_cannot_work(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", passages()[:30])
    with pytest.raises(TextmillError, match=r"corpus\.quality_good: needs corpus\.quality_bad too"):
        config_of(tmp_path, sources=[source], quality_good=[source])
    few = write(tmp_path / "few.jsonl", passages()[:3])
    with pytest.raises(TextmillError, match=r"corpus\.quality_bad: found 3 texts, at least 20 are needed"):
        prepare(config_of(tmp_path, sources=[source], quality_good=[source], quality_bad=[few]))
