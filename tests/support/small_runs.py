"""The config of a small run on the quickstart's tokens."""

from __future__ import annotations

from pathlib import Path

from bench.kill_train import trained
from textmill.config import RunConfig
from textmill.where import open_where


def config_for(root: Path, run: Path, steps: int, *words: str) -> RunConfig:
    _, where, *settings = trained(root, run, steps)
    if any(word.startswith("model.init_from") for word in words):
        settings = [word for word in settings if not word.startswith("model.shape")]  # the weights bring their own
    return open_where(where, [*settings, *words]).config
