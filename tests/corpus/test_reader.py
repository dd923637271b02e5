"""A corpus as a sequence has the documents of its shards, in order, at every position."""

from __future__ import annotations

from pathlib import Path

import pytest

from textmill.config import CorpusConfig, LocalRunner, RunConfig
from textmill.corpus import shards
from textmill.corpus.document import SPLITS
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import list_shards, open_corpus, read_documents
from textmill.errors import TextmillError


@pytest.fixture
def folder(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "GROUP_ROWS", 7)  # many row groups in a small corpus
    corpus = CorpusConfig(sources=[str(tiny_texts)], section_chars=100)
    return prepare(RunConfig(folder=str(tiny_texts.parent), corpus=corpus, runner=LocalRunner(workers=1)))


def test_every_document_by_position(folder: Path) -> None:
    wanted = [document for split in SPLITS for path in list_shards(folder, split) for document in read_documents(path)]
    corpus = open_corpus(folder)
    assert len(corpus) == len(wanted) > 40
    assert [corpus[place] for place in range(len(corpus))] == wanted == list(corpus)
    assert [corpus[-place] for place in range(1, len(corpus) + 1)] == wanted[::-1]
    assert corpus[3:20:4] == wanted[3:20:4]
    assert sum(len(open_corpus(folder, split)) for split in SPLITS) == len(corpus)
    for place in (len(corpus), -len(corpus) - 1):
        with pytest.raises(IndexError):
            corpus[place]


def test_a_split_may_be_empty(folder: Path) -> None:
    for path in list_shards(folder, "test"):
        path.unlink()
    assert len(open_corpus(folder, "test")) == 0
    with pytest.raises(TextmillError, match="run textmill prepare first"):
        open_corpus(folder / "elsewhere")
