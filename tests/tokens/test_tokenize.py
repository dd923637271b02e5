"""The command tokenize: ids equal those of tokenizers, nothing is lost, the same bytes on every run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from textmill.config import RunConfig
from textmill.corpus import find_sources, records, shards
from textmill.corpus.document import SPLITS, Document
from textmill.corpus.prepare import prepare
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError
from textmill.storage.stages import open_manifest
from textmill.tokens import tokenize as tokenize_module
from textmill.tokens.lineage import Lineage
from textmill.tokens.store import open_store
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.encoders import FastEncoder
from textmill.tokens.vocabulary.fitting import fit_tokenizer

END = "<|endoftext|>"


@pytest.fixture
def world(tmp_path: Path, tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three texts and some lines with special characters, in row groups of a few rows."""
    lines = [f"a {END} in the text", "x", "  two  spaces\u3000wide ", "don't 12345 👩‍👧 e\u0301"]
    (tiny_texts / "lines.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    monkeypatch.setattr(shards, "GROUP_ROWS", 8)
    monkeypatch.setattr(find_sources, "FILE_BYTES", records.CHUNK_BYTES)  # a shard for each file
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(
    folder: str = "out", workers: int = 1, corpus: Any = None, tokenizer: Any = None, **tokens: Any
) -> RunConfig:
    sections = {
        "corpus": {"sources": ["texts"], "section_chars": 150, "split": [8.0, 1.0, 1.0], **(corpus or {})},
        "tokenizer": {"vocab": 400, **(tokenizer or {})},
        "tokens": tokens,
        "runner": {"workers": workers},
    }
    return RunConfig.model_validate({"folder": folder, **sections})


def made(config: RunConfig) -> Path:
    if config.tokenizer.use:
        fit_tokenizer(config)  # the report on the corpus would fail on texts that the tokenizer cannot encode
    prepare(config)
    return tokenize(config)


def documents(root: str, split: Any) -> list[Document]:
    return list(open_corpus(Path(root) / "corpus", split))


def reference(root: str) -> Tokenizer:
    """The tokenizers library on the same file."""
    inner = Tokenizer.from_file(str(Path(root) / "tokenizer" / "tokenizer.json"))
    inner.encode_special_tokens = True
    return inner


def ids_of(inner: Tokenizer, text: str) -> list[int]:
    ids: list[int] = inner.encode(text, add_special_tokens=False).ids
    return ids


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name not in ("run.yaml", "manifest.json")}


@pytest.mark.parametrize("append_end", [True, False])
@pytest.mark.parametrize("prepend_begin", [True, False])
def test_ids_counts_and_lineage(world: Path, append_end: bool, prepend_begin: bool) -> None:
    folder = made(config_of(append_end=append_end, prepend_begin=prepend_begin))
    inner = reference("out")
    end = inner.token_to_id(END)
    for split in SPLITS:
        rows, store, lineage = (
            documents("out", split),
            open_store(folder / split),
            Lineage(folder / f"{split}.lineage.parquet"),
        )
        wanted = [[end] * prepend_begin + ids_of(inner, row.text) + [end] * append_end for row in rows]
        assert store.ids.tolist() == [token for one in wanted for token in one]
        assert store.lengths.tolist() == [len(one) for one in wanted]
        assert store.index.documents.tolist() == list(range(len(rows) + 1))
        assert [lineage[document] for document in range(len(lineage))] == [(row.source, row.id) for row in rows]
        assert open_manifest(folder)["splits"][split] == {
            "documents": len(rows),
            "tokens": sum(map(len, wanted)),
            "bytes": sum(len(row.text.encode()) for row in rows),
            "words": sum(len(row.text.split()) for row in rows),
            "quarantined": 0,
        }
    assert len(documents("out", "train")) > 20


def test_the_older_index_format_is_written(world: Path) -> None:
    made(config_of("new"))
    folder = made(config_of("old", index_format="lazy"))
    assert (folder / "train.idx").read_bytes().startswith(b"TNTIDX")
    for split in SPLITS:
        one, other = open_store(folder / split), open_store(Path("new/tokens") / split)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.document_lengths().tolist() == other.document_lengths().tolist()


def test_sentences_are_sequences_as_in_megatron(world: Path) -> None:
    folder = made(config_of(corpus={"sentences": "split"}, level="sentence", prepend_begin=True))
    inner = reference("out")
    end = inner.token_to_id(END)
    rows, store = documents("out", "train"), open_store(folder / "train")
    wanted, bounds = [], [0]
    for row in rows:
        sentences = [ids for line in row.text.split("\n") if (ids := ids_of(inner, line))]
        sentences[0] = [end, *sentences[0]]
        sentences[-1] = [*sentences[-1], end]
        wanted += sentences
        bounds.append(len(wanted))
    assert store.lengths.tolist() == [len(one) for one in wanted]
    assert store.ids.tolist() == [token for one in wanted for token in one]
    assert store.index.documents.tolist() == bounds
    assert len(wanted) > len(rows)


def test_sentences_need_a_corpus_of_sentences(world: Path) -> None:
    config = config_of(level="sentence")
    prepare(config)
    with pytest.raises(TextmillError, match=r"prepare it again with corpus\.sentences=split"):
        tokenize(config)


@pytest.mark.long
def test_the_same_bytes_for_any_number_of_workers_and_tasks(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = content(made(config_of("one")))
    assert content(made(config_of("three", workers=3))) == whole
    monkeypatch.setattr(tokenize_module, "TASK_BYTES", 1)
    assert content(made(config_of("small"))) == whole


def test_resuming_after_a_stop(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = content(made(config_of("whole")))
    monkeypatch.setattr(tokenize_module, "TASK_BYTES", 1)
    encode, seen = tokenize_module.encode_task, []

    def fail_late(task: Any) -> Any:
        if len(seen) == 5:
            raise OSError(28, "No space left on device")
        seen.append(task.prefix.name)
        return encode(task)

    monkeypatch.setattr(tokenize_module, "encode_task", fail_late)
    with pytest.raises(TextmillError, match="No space left on device; fix that and run it again"):
        made(config_of("stopped"))
    assert len(list((world / "stopped" / "tokens.part").rglob("*.json"))) == 5 + 1
    again = []
    monkeypatch.setattr(
        tokenize_module, "encode_task", lambda task: (again.append(task.path("json").exists()), encode(task))[1]
    )
    assert content(tokenize(config_of("stopped"))) == whole
    assert again[:6] == [True] * 5 + [False]


def test_a_difference_falls_back_to_the_reference(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fastokens", reason="no fastokens: pip install fastokens")
    config = config_of("right")
    wanted = content(made(config))
    assert capsys.readouterr().err.count("otherwise") == 0
    encode = FastEncoder.encode

    def slip(self: FastEncoder, texts: list[str]) -> Any:
        ids, lengths = encode(self, texts)
        return (ids[::-1] if any("in the text" in text for text in texts) else ids), lengths

    monkeypatch.setattr(FastEncoder, "encode", slip)
    assert content(made(config_of("wrong"))) == wanted
    warning = capsys.readouterr().err
    assert "encodes texts/lines.jsonl, line 1, differently from tokenizers" in warning


def use_words(folder: Path, words: list[str]) -> str:
    """A tokenizer with these words only; it raises an error for any other word."""
    inner = Tokenizer(
        models.WordLevel({END: 0, **{word: number for number, word in enumerate(words, 1)}}, unk_token="none")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([END])
    folder.mkdir()
    inner.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_failed_documents_are_quarantined(world: Path) -> None:
    texts = ["a b", "a c b", "b", "\u00ad", "a a", "z"]
    (world / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    setting = {"sources": ["few.jsonl"], "split": [1.0], "rules": [], "max_unreadable": 0.9}
    folder = made(config_of(corpus=setting, tokenizer={"use": use_words(world / "words", ["a", "b"])}))
    bad = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert [(one["file"], one["place"]) for one in bad] == [
        ("few.jsonl", "line 2"),
        ("few.jsonl", "line 4"),
        ("few.jsonl", "line 6"),
    ]
    assert "UNK" in bad[0]["reason"]
    store, lineage = open_store(folder / "train"), Lineage(folder / "train.lineage.parquet")
    assert store.ids.tolist() == [1, 2, 0, 2, 0, 1, 1, 0]
    assert [lineage[document][1] for document in range(len(lineage))] == ["line 1", "line 3", "line 5"]
    counts = open_manifest(folder)["splits"]["train"]
    assert (counts["documents"], counts["quarantined"], counts["words"], counts["bytes"]) == (3, 3, 5, 7)
    strict = config_of("strict", corpus={**setting, "max_unreadable": 0.2}, tokenizer={"use": "words"})
    with pytest.raises(TextmillError, match=r"3 of 6 documents cannot be encoded.*few\.jsonl.*line 2"):
        made(strict)


def test_a_document_without_tokens_is_quarantined(world: Path) -> None:
    (world / "few.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["a b", " \t ", "b"]))
    setting = {"sources": ["few.jsonl"], "split": [1.0], "rules": [], "max_unreadable": 0.9}
    folder = made(config_of(corpus=setting, tokenizer={"use": use_words(world / "words", ["a", "b"])}))
    kept = [row.id for row in documents("out", "train")]
    lineage = Lineage(folder / "train.lineage.parquet")
    stored = [lineage[document][1] for document in range(len(lineage))]
    bad = [json.loads(line)["place"] for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert sorted(stored + bad) == sorted(kept)
    assert open_store(folder / "train").ids.tolist() == [1, 2, 0, 2, 0]


def test_the_throughput_is_printed(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(config_of())
    assert " MB/s, " in (
        line := [line for line in capsys.readouterr().err.splitlines() if line.startswith("tokenize: ")][-1]
    )
    assert line.endswith(" tokens/s")
