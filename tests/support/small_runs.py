"""The config of a small run on the quickstart's tokens."""

from __future__ import annotations

from pathlib import Path

from bench.kill_train import train_arguments
from textmill.config import RunConfig
from textmill.where import open_where


def config_for(root: Path, run: Path, steps: int, *changes: str) -> RunConfig:
    _, where, *settings = train_arguments(root, run, steps)
    if any(setting.startswith("model.init_from") for setting in changes):
        settings = [
            setting for setting in settings if not setting.startswith("model.shape")
        ]  # the shape is that of the given weights
    return open_where(where, [*settings, *changes]).config
