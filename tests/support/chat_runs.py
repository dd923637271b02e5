"""A few questions with their answers, and the config of a small model that learns them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.corpus.prepare import prepare
from textmill.tokens.tokenize import tokenize

PAIRS = {
    "안녕?": "반가워요.",
    "뭐 해?": "책을 읽어요.",
    "이름이 뭐야?": "방아라고 해요.",
    "배고파": "밥 먹으러 가요!",
    "잘 자": "좋은 꿈 꿔요. 🙂",
    "What is two plus two?": "Four.",
    "Who turns the wheel?": "The river does.",
    "Bye": "See you tomorrow, by the mill.",
}


def write_pairs(folder: Path, name: str, pairs: list[tuple[str, str]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"q": q, "a": a}) + "\n" for q, a in pairs), encoding="utf-8")
    return path


def config_of(folder: Path, **sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, dict[str, Any]] = {
        "corpus": {"sources": [str(folder / "pairs.jsonl")], "chat": "pairs", "split": [1, 0, 0]},
        "tokenizer": {"vocab": 400, "chat": "default"},
        "model": {"size": "nano", "shape": {"layers": 2, "heads": 2, "width": 64}},
        "train": {"layout": "chat", "length": 48, "batch": 4, "steps": 2, "warmup": 0},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    if tree["model"].get("init_from"):
        tree["model"] = {"init_from": tree["model"]["init_from"]}
    return RunConfig.model_validate({"folder": str(folder / "out"), **tree})


def prepare_and_tokenize(config: RunConfig) -> Path:
    prepare(config)
    return tokenize(config)
