"""A classification task made of documents with sources: which source is a passage from?"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSAGE = range(200, 501)
"""Characters of a passage."""
RATE, RANDOM_RATE = 1e-4, 5e-4
"""Learning rates of a pretrained net, and of one with random weights, which learns faster with a higher one."""


def passages(text: str) -> Iterator[str]:
    """Consecutive sentences, joined until they have the length of a passage."""
    joined = ""
    for line in text.splitlines():
        joined = f"{joined} {line.strip()}".strip()
        if len(joined) >= PASSAGE.start:
            if len(joined) in PASSAGE:
                yield joined
            joined = ""


def write_passages(path: Path, passages: dict[str, list[str]]) -> None:
    """Texts and labels as CSV."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["text", "label"])
        rows.writerows((text, source) for source, texts in sorted(passages.items()) for text in texts)


def tune_config(
    folder: Path, name: str, tokenizer: Path, net: dict[str, Any], length: int, minutes: float
) -> dict[str, Any]:
    """The settings of a finetuning, as in recipes/bert-classify.yaml."""
    return {
        "folder": str(folder / name),
        "corpus": {
            "labels": "sequence-classification",
            "sources": [str(folder / "train.csv"), str(folder / "valid.csv")],
            "source_splits": {"*train.csv": "train", "*valid.csv": "valid"},
        },
        "tokenizer": {"use": str(tokenizer)},
        "model": {"family": "bert", **net},
        "engine": {"compile": False},
        "train": {
            "layout": "labelled",
            "length": length,
            "batch": 32,
            "minutes": minutes,
            "warmup": 0.1,
            "learning_rate": RATE if name == "pretrained" else RANDOM_RATE,
            "betas": [0.9, 0.999],
            "schedule": "linear",
            "weight_decay": 0.01,
            "evaluate_every": 200,
            "save_every": 200,
            "log_every": 20,
        },
    }
