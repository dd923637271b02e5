"""Models by name: a folder on this machine, or a hub name that is fetched when there is a network."""

from __future__ import annotations

import re
from pathlib import Path

from textmill.errors import TextmillError

HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
WANTED = [
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
]


def open_folder(name: str, wanted: list[str] = WANTED) -> Path:
    """The folder that a name stands for; of a hub name the wanted files are fetched: safetensors and the tokenizer's, never pickles."""
    if Path(name).is_dir():
        return Path(name)
    if not HUB_NAME.match(name):
        raise TextmillError(
            f"{name}: no such folder; name a run, a checkpoint, a Hugging Face model folder or a hub name"
        )
    try:
        from huggingface_hub import snapshot_download  # a second of imports that only a hub name should cost
    except ImportError:
        raise TextmillError(
            f"{name}: no such folder; a hub name needs huggingface_hub; run: pip install 'textmill[hf]'"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the client raises many kinds: offline, not found, gated
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TextmillError(
            f"{name}: no such folder, and the hub did not give it ({reason}); check the name and the network"
        ) from None
