"""Feature rows: exactly the rule of jax-lm-training, readable with `datasets`, and usable as a layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from textmill.cli import main
from textmill.config import BeamRunner, LocalRunner, RunConfig
from textmill.config.tokenizer import FeaturesConfig
from textmill.corpus.document import SPLITS
from textmill.corpus.shards import open_corpus
from textmill.errors import TextmillError
from textmill.storage.files import find_damage, read_json
from textmill.tokens.batches import features as features_module
from textmill.tokens.batches import features as layout_module
from textmill.tokens.batches.batch import IGNORED
from textmill.tokens.batches.blend import DataRange
from textmill.tokens.batches.features import SCHEMA, FeaturesLayout, build_rows, count_feature_rows, cut_chunks
from textmill.tokens.batches.loader import Batches, batches_in_order
from textmill.tokens.existing_tokens import Table, split_borders
from textmill.tokens.splits import FeatureRows, WeightedStore, open_splits
from textmill.tokens.store import StoreWriter, TokenStore, open_store
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.tokenizer import open_tokenizer
from textmill.where import open_where

END = 50256
SMALL = ["max_length=16", "min_length=6", "stride=5"]


def rows_of(documents: list[list[int]], rule: FeaturesConfig, special: int = END) -> list[dict[str, list[Any]]]:
    """The rows of documents as textmill builds them."""
    sizes = np.array([len(document) for document in documents], np.int64)
    chunks = cut_chunks(sizes, rule)
    cut = [
        documents[number][start : start + count]
        for number, start, count in zip(*map(np.ndarray.tolist, vars(chunks).values()), strict=True)
    ]
    made = build_rows(np.array([token for chunk in cut for token in chunk], np.int64), chunks.counts, rule, special)
    assert np.bincount(chunks.documents, minlength=len(documents)).tolist() == count_feature_rows(sizes, rule).tolist()
    return [{name: made[name][row].tolist() for name in SCHEMA.names} for row in range(len(chunks.counts))]


def slow_rows(documents: list[list[int]], rule: FeaturesConfig, special: int) -> list[dict[str, list[Any]]]:
    """The documented rule, one token at a time."""
    rows = []
    for document in documents:
        for start in range(0, len(document), rule.stride):
            chunk = document[start : start + rule.max_length - rule.reserved_tokens + 1]
            if len(chunk) <= rule.min_length - rule.reserved_tokens:
                continue
            row, real = [special, *chunk, special], len(chunk) + 2
            while len(row) < rule.max_length + 1:
                row.append(special)
            inputs, labels, mask = [], [], []
            for place in range(rule.max_length):
                inputs.append(row[place])
                mask.append(1.0 if place < real else 0.0)
                labels.append(row[place + 1] if place + 1 < real else -100)
            rows.append({"input_ids": inputs, "attention_mask": mask, "labels": labels})
    return rows


def test_the_published_rows() -> None:
    """Those of jax-lm-training, but for the padding, which is 0 there."""
    rows = rows_of([list(range(1, 21))], FeaturesConfig(max_length=8, min_length=4, reserved_tokens=2, stride=4))
    chunks = [range(1, 8), range(5, 12), range(9, 16), range(13, 20)]
    whole = [{"input_ids": [END, *chunk], "attention_mask": [1.0] * 8, "labels": [*chunk, END]} for chunk in chunks]
    last = [END, 17, 18, 19, 20, END, END, END], [1.0] * 6 + [0.0] * 2, [17, 18, 19, 20, END, -100, -100, -100]
    assert rows == [*whole, dict(zip(SCHEMA.names, last, strict=True))]


def test_the_published_chunks_of_the_defaults() -> None:
    chunks = cut_chunks(np.array([300]), FeaturesConfig())
    assert list(zip(chunks.starts.tolist(), chunks.counts.tolist(), strict=True)) == [(0, 255), (128, 172)]
    row = rows_of([list(range(1, 301))], FeaturesConfig())[1]
    assert row["input_ids"][:3] == [END, 129, 130]
    assert row["input_ids"][172:175] == [300, END, END]
    assert sum(row["attention_mask"]) == 174


def test_token_0_is_a_token_like_others() -> None:
    rule = FeaturesConfig(max_length=8, min_length=2, stride=8)
    (row,) = rows_of([[5, 0, 7]], rule)
    assert row == {
        "input_ids": [END, 5, 0, 7, END, *[END] * 3],
        "attention_mask": [1.0] * 5 + [0.0] * 3,
        "labels": [5, 0, 7, END, *[-100] * 4],
    }


@settings(max_examples=80, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), max_size=8), data=st.data(), special=st.sampled_from([0, 9]))
def test_rows_follow_the_documented_rule(sizes: list[int], data: st.DataObject, special: int) -> None:
    longest = data.draw(st.integers(2, 20))
    rule = FeaturesConfig(
        max_length=longest,
        min_length=data.draw(st.integers(0, longest)),
        stride=data.draw(st.integers(1, 25)),
        reserved_tokens=data.draw(st.integers(0, min(4, longest))),
    )
    documents = [data.draw(st.lists(st.integers(0, 12), min_size=size, max_size=size)) for size in sizes]
    assert rows_of(documents, rule, special) == slow_rows(documents, rule, special)


def config_for(folder: Path, *arguments: str) -> RunConfig:
    (folder / "textmill.yaml").touch()
    small = [f"tokens.features.{word}" for word in SMALL]
    return open_where(
        str(folder),
        [f"corpus.sources={folder / 'texts'}", "corpus.documents=block", "tokenizer.vocab=300", *small, *arguments],
    ).config


@pytest.fixture
def life(tiny_texts: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus, its tokenizer, and its tokens with rows in several files."""
    monkeypatch.setattr(features_module, "FILE_TOKENS", 2000)
    monkeypatch.setattr(features_module, "ROW_GROUP_TOKENS", 400)
    folder = tiny_texts.parent
    config_for(folder)
    arguments = [
        f"corpus.sources={tiny_texts}",
        "corpus.documents=block",
        "corpus.split=60,30,10",
        "tokenizer.vocab=300",
    ]
    arguments += ["tokens.kind=features", "runner.workers=1", *(f"tokens.features.{word}" for word in SMALL)]
    for command in ("prepare", "fit-tokenizer", "tokenize"):
        assert main([command, str(folder), *arguments]) == 0
    return folder


def test_rows_of_a_corpus_open_in_datasets(life: Path) -> None:
    tokens, tokenizer = life / "tokens", open_tokenizer(life / "tokenizer")
    files = read_json(tokens / "manifest.json")["files"]
    assert find_damage(tokens, files) == []
    for split in SPLITS:
        paths = sorted((tokens / "features").glob(f"{split}-*.parquet"))
        assert [path.name for path in paths] == [
            f"{split}-{number:05d}-of-{len(paths):05d}.parquet" for number in range(len(paths))
        ]
        assert {f"features/{path.name}" for path in paths} <= set(files)
        found = datasets.Dataset.from_parquet([str(path) for path in paths], cache_dir=str(life / "cache"))
        documents = [tokenizer.encode(document.text) for document in open_corpus(life / "corpus", split)]
        assert found.to_list() == slow_rows(
            documents, FeaturesConfig(max_length=16, min_length=6, stride=5), tokenizer.eos_id
        )
        assert pq.read_schema(paths[0]).equals(SCHEMA)
    assert len(list((tokens / "features").iterdir())) > 3


def tables_in(folder: Path) -> dict[str, pa.Table]:
    return {path.name: pq.read_table(path) for path in (folder / "features").iterdir()}


@pytest.mark.long_with(BeamRunner())
@pytest.mark.parametrize("runner", [LocalRunner(workers=2), BeamRunner()], ids=["two processes", "beam"])
def test_files_are_the_same_on_any_runner(life: Path, runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(runner, BeamRunner):
        pytest.importorskip("apache_beam", reason="needs apache-beam: pip install 'textmill[beam]'")
    monkeypatch.setattr(features_module, "ROW_GROUP_TOKENS", 1 << 20)  # the value in the runner's own processes
    config = config_for(life, "tokens.kind=features")
    found = []
    for number, one in enumerate((LocalRunner(workers=1), runner)):
        tokens = config.tokens.model_copy(update={"folder": str(life / str(number))})
        tokenize(config.model_copy(update={"runner": one, "tokens": tokens}))
        found.append({path.name: path.read_bytes() for path in (life / str(number) / "features").iterdir()})
    assert len(found[0]) > 3
    assert found[0] == found[1]


def test_end_tokens_of_a_store_are_left_out(life: Path) -> None:
    tokenize(
        config_for(
            life,
            "tokens.kind=features",
            "tokens.append_end=false",
            "runner.workers=1",
            f"tokens.folder={life / 'open'}",
        )
    )
    found, wanted = (tables_in(life / name) for name in ("open", "tokens"))
    for split in SPLITS:
        whole = [
            pa.concat_tables(tables[name] for name in sorted(tables) if name.startswith(split))
            for tables in (found, wanted)
        ]
        assert whole[0].equals(whole[1])


def features_store(life: Path, split: str = "train") -> WeightedStore:
    (share,) = open_splits(config_for(life, "train.layout=features")).by_split[split]
    return share


def layout_of(share: WeightedStore, **options: Any) -> FeaturesLayout:
    assert share.features is not None
    return FeaturesLayout(share.features, share.store, **{"length": 16, "seed": None, **options})


def read_rows(folder: Path, split: str = "train") -> list[tuple[list[int], list[int]]]:
    tables = [pq.read_table(path) for path in sorted((folder / "tokens" / "features").glob(f"{split}-*"))]
    return [(row["input_ids"], row["labels"]) for table in tables for row in table.to_pylist()]


def pairs_of(rows: Any) -> list[tuple[list[int], list[int]]]:
    return list(zip(rows.inputs.tolist(), rows.labels.tolist(), strict=True))


def test_rows_as_a_layout(life: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share, wanted = features_store(life), read_rows(life)
    layout = layout_of(share, folder=life / "index")
    assert layout.samples_per_epoch == len(wanted)
    assert pairs_of(layout.build_samples(np.arange(len(wanted)))) == wanted
    assert [pair for batch in batches_in_order([layout], 7) for pair in pairs_of(batch)] == wanted
    monkeypatch.setattr(layout_module, "_blocks", lambda *_: pytest.fail("made again"))
    shuffled = layout_of(share, seed=5, folder=life / "index")
    epochs = [
        pairs_of(shuffled.build_samples(np.arange(epoch * len(wanted), (epoch + 1) * len(wanted))))
        for epoch in range(2)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(wanted)
    assert epochs[0] != epochs[1]
    assert epochs[0] != wanted
    batches = Batches([shuffled], [DataRange(0, 10, (), [("", 1.0)])])
    assert pairs_of(batches.batch_at(3, slice(2, 5))) == epochs[0][32:35]
    monkeypatch.undo()
    assert pairs_of(layout_of(share).build_samples(np.arange(5))) == wanted[:5], "and without a folder"


def test_the_document_of_a_row_is_found(life: Path) -> None:
    share = features_store(life)
    layout = layout_of(share, seed=3)
    samples = np.arange(layout.samples_per_epoch, layout.samples_per_epoch + 40)
    rows, seen = layout.build_samples(samples), layout.find_documents(samples)
    assert seen[0].tolist() == list(range(40))
    for row, document in enumerate(seen[1].tolist()):
        edges = share.store.document_starts(np.array([document, document + 1]))
        text = " ".join(map(str, share.store.ids[edges[0] : edges[1]].tolist()))
        chunk = [token for token in rows.labels[row].tolist() if token != IGNORED][:-1]
        assert " ".join(map(str, chunk)) in text


def foreign(folder: Path, rows: list[dict[str, list[Any]]], files: int = 3) -> Table:
    """Rows as Beam's WriteToParquet writes them: shards without a file ending."""
    folder.mkdir()
    for number in range(files):
        pq.write_table(
            pa.Table.from_pylist(rows[number::files], SCHEMA), folder / f"wikitext-{number:05d}-of-{files:05d}"
        )
    paths = tuple(sorted(folder.iterdir()))
    return Table(paths, 0, len(rows))


def empty_store(folder: Path) -> TokenStore:
    with StoreWriter(folder / "s", np.dtype(np.uint16)) as writer:
        writer.add([[1]])
    return open_store(folder / "s")


def test_unusable_rows_are_an_error(tmp_path: Path) -> None:
    store = empty_store(tmp_path)
    rows = rows_of([list(range(1, 21))], FeaturesConfig(max_length=8, min_length=4, stride=4))
    table = foreign(tmp_path / "good", rows)
    layout = FeaturesLayout(FeatureRows(table), store, length=8, seed=None, vocab=END + 1)
    assert sorted(pairs_of(layout.build_samples(np.arange(5)))) == sorted(
        (row["input_ids"], row["labels"]) for row in rows
    )
    assert layout.find_documents(np.arange(5))[1].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(TextmillError, match=r"token id 50256, but the tokenizer's vocabulary has 50,256 tokens"):
        FeaturesLayout(FeatureRows(table), store, length=8, seed=None, vocab=END).build_samples(np.arange(5))
    with pytest.raises(
        TextmillError,
        match=r"row of 8 tokens, but train.length is 16; all rows need the same length: set train.length=8",
    ):
        FeaturesLayout(FeatureRows(table), store, length=16, seed=None, folder=tmp_path / "index")
    assert [path.name for path in (tmp_path / "index").iterdir()] == ["lock"], "no temporary files are left"
    grouped = foreign(tmp_path / "grouped", [{**row, "labels": row["input_ids"]} for row in rows])
    with pytest.raises(TextmillError, match=r"labels of row 0 are not its next tokens.*train.layout=padded"):
        FeaturesLayout(FeatureRows(grouped), store, length=8, seed=None)
    with pytest.raises(TextmillError, match="no rows to train on"):
        FeaturesLayout(FeatureRows(Table((), 0, 0)), store, length=8, seed=None)


TINY = [
    "model.size=nano",
    "model.shape.layers=1",
    "model.shape.width=16",
    "model.shape.heads=2",
    "train.length=16",
    "train.batch=4",
    "train.steps=2",
    "train.layout=features",
    "engine.device=cpu",
    "sample.max_tokens=2",
    "evaluate.baselines=false",
]


def test_rows_are_trained_on(life: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(life), *TINY]) == 0
    assert "valid_loss" in (life / "run" / "metrics.jsonl").read_text()
    assert main(["evaluate", str(life / "run")]) == 0
    assert main(["train", str(life), *TINY, "train.length=32", f"train.folder={life / 'other'}"]) == 2
    assert "set train.length=16" in capsys.readouterr().err


def test_missing_rows_are_an_error(life: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = f"tokens.folder={life / 'plain'}"
    assert main(["tokenize", str(life), plain, "tokenizer.vocab=300"]) == 0
    assert main(["train", str(life), plain, *TINY]) == 2
    assert "has no feature rows" in capsys.readouterr().err


def test_existing_rows_through_all_commands(life: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((life / "tokens" / "features").glob("train-*"))
    (life / "beam").mkdir()
    for number, path in enumerate(paths):
        path.rename(life / "beam" / f"wikitext-{number:05d}-of-{len(paths):05d}")
    (life / "beam" / "mine.yaml").write_text(
        f"folder: out\ntokens: {{use: ['wikitext-*']}}\ntokenizer: {{use: {life / 'tokenizer'}}}\n"
    )
    assert main(["run", str(life / "beam" / "mine.yaml"), "runner.workers=1", "corpus.split=80,10,10", *TINY]) == 0
    [saved] = (life / "beam" / "out" / "run" / "evaluation").glob("step-0000002-perplexity-valid-*.json")
    measured = read_json(saved)["perplexity"]["card"]
    rows = [row for path in sorted((life / "beam").glob("wikitext-*")) for row in pq.read_table(path).to_pylist()]
    edges = split_borders([80, 10, 10], len(rows))
    valid = rows[edges[1] : edges[2]]
    assert (measured["documents"], measured["tokens"]) == (
        len(valid),
        sum(map(sum, (row["attention_mask"] for row in valid))),
    )
