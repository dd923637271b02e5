"""Opens the model that is served: its scheduler, its chat template, its name and the key."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint, StepChoice, find_model
from textmill.config import EngineConfig, RunConfig, ServeConfig
from textmill.errors import TextmillError
from textmill.server.model_process import open_remote_scheduler
from textmill.server.service import Scheduler, Service
from textmill.tokens.chat_template import open_template

KEY = "TEXTMILL_API_KEY"
SHORTEST = 8
"""Characters of a key at least."""
Open = Callable[[Checkpoint, EngineConfig, ServeConfig], Scheduler]


def open_service(
    config: RunConfig, step: StepChoice = "latest", open_scheduler: Open = open_remote_scheduler
) -> Service:
    """The service of a config: the model, in a process of its own unless `open_scheduler` puts it elsewhere, and all a request needs."""
    serve, key = config.serve, read_api_key(config.serve)
    checkpoint = find_model(config.folder_of("train"), config.model.init_from, step)
    template = open_template(checkpoint.tokenizer)
    scheduler = open_scheduler(checkpoint, config.engine, serve)
    return Service(
        scheduler, serve, config.sample, serve.model_name or name_of(checkpoint), checkpoint.step, template, key
    )


def name_of(checkpoint: Checkpoint) -> str:
    """A model's name: its run's folder, or its own."""
    folder = checkpoint.folder.resolve()
    parts = [
        part
        for part in (folder, *folder.parents)
        if part.name and part.name != "run" and not part.name.startswith("step-")
    ]
    return parts[0].name if parts else "model"


def read_api_key(serve: ServeConfig) -> str | None:
    """The API key from the file or the environment; None: no key is asked."""
    if serve.key_file is None:
        key, where = os.environ.get(KEY), f"the environment's {KEY}"
        if key is None:
            return None
    else:
        where = f"serve.key_file: {serve.key_file}"
        try:
            lines = Path(serve.key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError):
            raise TextmillError(f"{where}: cannot be read; give a text file whose first line is the key") from None
        key = lines[0] if lines else ""
    key = key.strip()
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise TextmillError(f"{where}: is no key; give {SHORTEST} or more printable ASCII characters without a space")
    return key
