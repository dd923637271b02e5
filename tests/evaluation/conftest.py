"""A small run as `textmill run` leaves it: tokens of three languages, a tokenizer and one checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.small_models import single_process_snapshot
from textmill.checkpoints.folders import Checkpoint, open_checkpoint
from textmill.checkpoints.writing import write_checkpoint
from textmill.config import EvaluateConfig, RunConfig, TokenizerConfig, TorchEngine
from textmill.models import initial_weights
from textmill.models.gpt2 import family as gpt2
from textmill.storage.files import write_json
from textmill.tokens.store import StoreWriter, TokenStore, dtype_for, open_store
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

WORDS = [
    "the",
    "mill",
    "stands",
    "by",
    "a",
    "river",
    "and",
    "its",
    "wheel",
    "turns",
    "물레방아는",
    "강가에",
    "서",
    "있다",
    "çark",
    "döner",
]


def _documents(seed: int, count: int) -> list[str]:
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(3, 12))) + "." for _ in range(count)]


DOCUMENTS = {"train": _documents(1, 60), "valid": _documents(2, 12), "test": []}
MakeStore = Callable[[list[int]], TokenStore]


@pytest.fixture(scope="session")
def documents() -> dict[str, list[str]]:
    """The texts of each split."""
    return DOCUMENTS


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    """Byte-level BPE of these texts."""
    return fit(iter([DOCUMENTS["train"]]), TokenizerConfig(vocab=320))


@pytest.fixture
def new_store(tmp_path: Path) -> MakeStore:
    """Writes a token store of one document."""

    def make(ids: list[int]) -> TokenStore:
        with StoreWriter(tmp_path / "some", np.dtype(np.uint16)) as writer:
            writer.add([ids] if ids else [])
        return open_store(tmp_path / "some")

    return make


def _write_tokens(folder: Path, tokenizer: TextTokenizer) -> None:
    splits = {}
    folder.mkdir(parents=True)
    for split, texts in DOCUMENTS.items():
        rows = [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
        with StoreWriter(folder / split, dtype_for(tokenizer.vocab)) as store:
            store.add(rows)
        counts = {"tokens": sum(map(len, rows)), "bytes": sum(len(text.encode()) for text in texts)}
        splits[split] = {"documents": len(texts), **counts, "words": sum(len(text.split()) for text in texts)}
    facts = {"tokenizer": tokenizer.fingerprint, "vocab": tokenizer.vocab, "end": tokenizer.eos_id, "splits": splits}
    write_json(
        folder / "manifest.json", {"verb": "tokenize", **facts, "files": {}, "made_from": {"tokens.append_end": True}}
    )


@pytest.fixture(scope="session")
def life(tmp_path_factory: pytest.TempPathFactory, tokenizer: TextTokenizer) -> Path:
    """A project folder: tokens, and a run with one checkpoint."""
    folder = tmp_path_factory.mktemp("life")
    _write_tokens(folder / "tokens", tokenizer)
    shape = gpt2.Shape(
        layers=2, heads=2, width=32, inner=128, positions=24, vocab=tokenizer.vocab, eos_id=tokenizer.eos_id
    )
    weights = [
        (name, values * np.float32(8) if values.ndim == 2 else values) for name, values in initial_weights(shape, 3)
    ]
    texts = {"config.json": json.dumps(gpt2.hf_config_of(shape)), **tokenizer.files(shape.positions)}
    files = {name: text.encode() for name, text in texts.items()}
    write_checkpoint(folder / "run", single_process_snapshot(123, weights, [], {"step": 123}, files))
    return folder


@pytest.fixture(scope="session")
def checkpoint(life: Path) -> Checkpoint:
    """The run's checkpoint."""
    return open_checkpoint(life / "run" / "step-0000123")


@pytest.fixture
def config(life: Path) -> RunConfig:
    """Measures the valid split on the CPU in fp32."""
    return RunConfig(
        folder=str(life), engine=TorchEngine(device="cpu", precision="fp32"), evaluate=EvaluateConfig(batch=4)
    )
