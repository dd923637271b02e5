"""Sources with a name: their own field, counts by name, and a blend by weight."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import textmill
from textmill.config import RunConfig
from textmill.config.load import build_config, resolve_paths
from textmill.corpus.prepare import prepare
from textmill.errors import TextmillError
from textmill.reports.page import build_page
from textmill.reports.run_files import read_run
from textmill.tokens.batches.loader import open_batches, valid_batches
from textmill.tokens.splits import open_splits
from textmill.tokens.tokenize import tokenize
from textmill.tokens.vocabulary.fitting import fit_tokenizer

SIZES = {"news": 300, "plays": 200, "wiki": 400}


def config_of(folder: Path, weights: dict[str, float] | None = None, **corpus: Any) -> RunConfig:
    sources = [{"name": name, "path": [f"{name}/*.jsonl"], "text_key": "body"} for name in SIZES]
    for one in sources if weights else ():
        one["weight"] = weights[one["name"]]  # type: ignore[index]
    tree = {
        "folder": str(folder / "out"),
        "corpus": {"sources": sources, "split": [8, 2, 0]} | corpus,
        "tokenizer": {"vocab": 300},
        "runner": {"workers": 1},
        "train": {"length": 16, "batch": 10},
    }
    return build_config(resolve_paths(tree, folder))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each source has two files and words of its own."""
    folder = tmp_path_factory.mktemp("named")
    for name, size in SIZES.items():
        (folder / name).mkdir()
        for part in range(2):
            texts = (f"{name} {name} {number} " * 4 for number in range(part, size, 2))
            lines = "".join(json.dumps({"body": text}) + "\n" for text in texts)
            (folder / name / f"{part}.jsonl").write_text(lines)
    config = config_of(folder)
    prepare(config)
    fit_tokenizer(config)
    tokenize(config)
    return folder


def test_counts_by_name(project: Path) -> None:
    account = json.loads((project / "out" / "corpus" / "account.json").read_text())
    manifest = json.loads((project / "out" / "tokens" / "manifest.json").read_text())
    for name, size in SIZES.items():
        assert sum(account["by_name"][name][split]["documents"] for split in ("train", "valid")) == size
        for split in ("train", "valid"):
            counts = manifest["sources"][name][split]
            assert counts["documents"] == account["by_name"][name][split]["documents"]
            assert counts["bytes"] == account["by_name"][name][split]["bytes"]
    for split in ("train", "valid"):
        tokens = sum(counts[split]["tokens"] for counts in manifest["sources"].values())
        assert tokens == manifest["splits"][split]["tokens"]


def test_tokens_of_a_batch_follow_the_weights(project: Path) -> None:
    weights = {"news": 5.0, "plays": 3.0, "wiki": 2.0}
    config = config_of(project, weights)
    splits = open_splits(config)
    batches = open_batches(config.train, splits, length=16, folder=None)
    tokens: Counter[str] = Counter()
    for step in range(2000):
        batch = batches.batch_at(step)
        for row in batch.inputs:
            words = Counter(splits.tokenizer.decode(row.tolist()).split())
            most = max(SIZES, key=words.__getitem__)
            tokens[most if words[most] else "none"] += len(row)
    shares = {name: tokens[name] / tokens.total() for name in weights}
    assert shares == pytest.approx({name: weight / 10 for name, weight in weights.items()}, abs=0.01)
    mixture = batches.describe_mixture(20_000)
    assert mixture is not None
    assert mixture.startswith("mixture: news 50.0% of the samples, ")
    assert [part.name for part in splits.by_split["valid"]] == list(SIZES)
    assert sum(len(batch.inputs) for batch in valid_batches(config.train, splits, length=16)) > 0


def test_few_valid_batches_are_of_all_sources(project: Path) -> None:
    config = config_of(project, dict.fromkeys(SIZES, 1.0))
    settings = {
        "folder": str(project / "out"),
        "corpus": config.model_dump()["corpus"],
        "runner": {"workers": 1},
        "model": {"shape": {"layers": 1, "heads": 1, "width": 8, "positions": 16}},
        "train": {"length": 16, "batch": 10, "steps": 1, "evaluate_every": 1, "evaluate_batches": 3},
    }
    textmill.train(build_config(settings))
    metrics = [json.loads(line) for line in (project / "out" / "run" / "metrics.jsonl").read_text().splitlines()]
    found = {name for line in metrics for name in line if name.startswith("valid_loss_")}
    assert found == {f"valid_loss_{name}" for name in SIZES}
    page = build_page([read_run(project / "out" / "run")])
    stored = json.loads((project / "out" / "tokens" / "manifest.json").read_text())["sources"]
    assert all(f'["{name}, train", "{stored[name]["train"]["documents"]:,}"' in page for name in SIZES)
    assert all(f'"{stored[name]["train"]["tokens"]:,}"' in page for name in SIZES)


def test_without_weights_the_tokens_are_one_store(project: Path) -> None:
    splits = open_splits(config_of(project))
    assert len(splits.by_split["train"]) == 1
    assert [part.name for part in splits.by_split["valid"]] == list(SIZES)
    weighted = open_splits(config_of(project, dict.fromkeys(SIZES, 1.0)))
    assert weighted.fingerprint != splits.fingerprint


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{"name": "a", "path": "x", "weight": 1}, "y"], "'y' has no weight, and others have"),
        ([{"name": "a", "path": "x"}, {"name": "a", "path": "y"}], "two entries have the name 'a'"),
        ([{"name": "a", "path": "x", "weight": 0}], "keys such as name, path, weight"),
        ([{"name": "a/b", "path": "x"}], "name"),
        ([{"path": "x"}], "name"),
    ],
)
def test_mistakes(tmp_path: Path, sources: list[Any], message: str) -> None:
    with pytest.raises(TextmillError, match=message):
        build_config({"folder": str(tmp_path), "corpus": {"sources": sources}})


def test_a_file_of_two_sources_is_refused(project: Path) -> None:
    sources = [{"name": "news", "path": "news/*.jsonl"}, {"name": "other", "path": ["news/0.jsonl"]}]
    with pytest.raises(TextmillError, match="is in the sources 'other' and 'news'"):
        prepare(config_of(project, sources=sources), "yes")
