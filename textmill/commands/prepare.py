"""The command prepare: the corpus folder, decontaminated with the readers of the evaluation tasks."""

from __future__ import annotations

from pathlib import Path

from textmill.config import RunConfig
from textmill.corpus.prepare import prepare as prepare_corpus
from textmill.evaluation.tasks import open_evaluation_data
from textmill.storage.stages import Force


def prepare(config: RunConfig, force: Force = "no") -> Path:
    """Build the corpus folder of this config; an existing, up-to-date folder is kept."""
    return prepare_corpus(config, force, open_evaluation_data)
