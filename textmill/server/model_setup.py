"""Opens the model to serve: its process, its chat template, its name and the API key."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import EngineConfig, RunConfig, ServeConfig
from textmill.errors import TextmillError
from textmill.generation.encoders.embedding_texts import can_embed, new_text_encoder
from textmill.generation.encoders.fill_texts import new_masked_texts
from textmill.generation.requests import check_served_settings
from textmill.models import find_run_model, has_masked_head, open_family, read_shape
from textmill.server.model_process import start_model_process
from textmill.server.service import ServedModel, Service
from textmill.tokens.chat_template import open_template

KEY_VARIABLE = "TEXTMILL_API_KEY"
MIN_KEY_LENGTH = 8
OpenModel = Callable[[Checkpoint, EngineConfig, ServeConfig], ServedModel]


def open_service(config: RunConfig, step: StepChoice | None = None, open_model: OpenModel | None = None) -> Service:
    """Open the service of a config. By default the model runs in a process of its own."""
    serve = config.serve
    key = read_api_key(config.serve)
    check_served_settings(config.sample)
    checkpoint = find_run_model(config, step)
    shape = read_shape(checkpoint.folder)
    generates = open_family(shape.family).OBJECTIVE == "next_token"
    template = open_template(checkpoint.tokenizer) if generates else None
    open_model = open_model or partial(start_model_process, embed=config.embed)
    model = open_model(checkpoint, config.engine, serve)
    tokenizer = model.tokenizer
    name = serve.model_name or find_model_name(checkpoint)
    encoder = new_text_encoder(shape, tokenizer, config.embed, checkpoint.folder)[0] if can_embed(shape) else None
    masked_texts = new_masked_texts(tokenizer, shape.positions, checkpoint.folder) if has_masked_head(shape) else None
    return Service(
        model,
        serve,
        config.sample,
        name,
        checkpoint.step,
        template,
        key,
        generates=generates,
        text_encoder=encoder,
        masked_texts=masked_texts,
    )


def find_model_name(checkpoint: Checkpoint) -> str:
    """Return the name of the run's folder, or of the model's own folder."""
    folder = checkpoint.folder.resolve()
    names = [one.name for one in (folder, *folder.parents)]
    return next((name for name in names if name and name != "run" and not name.startswith("step-")), "model")


def read_api_key(serve: ServeConfig) -> str | None:
    """Read the API key from the file or the environment; None if there is none."""
    if serve.key_file is None:
        key = os.environ.get(KEY_VARIABLE)
        where = f"environment variable {KEY_VARIABLE}"
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
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise TextmillError(
            f"{where}: is not a valid key; use {MIN_KEY_LENGTH} or more printable ASCII characters without spaces"
        )
    return key
