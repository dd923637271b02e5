"""Model folders by name: a local folder, or a Hugging Face hub name that is downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from textmill.errors import TextmillError

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
MODEL_FILES = [
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
]


def find_model_folder(name: str, patterns: list[str] = MODEL_FILES) -> Path:
    """The local folder of a model; from the hub only the files in `patterns` are downloaded, never pickles."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise TextmillError(f"{name}: is a file; turn it into a model folder first: textmill import {name} FOLDER")
    if not HUB_NAME.match(name):
        raise TextmillError(
            f"{name}: no such folder; use a run, a checkpoint, a Hugging Face model folder or a hub name"
        )
    try:
        from huggingface_hub import snapshot_download  # importing it takes a second
    except ImportError:
        raise TextmillError(
            f"{name}: no such folder; a download from the hub needs huggingface_hub; run: pip install 'textmill[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client raises many types: offline, not found, gated
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TextmillError(
            f"{name}: no such folder, and downloading it from the hub failed ({reason}); check the name and the network"
        ) from None
