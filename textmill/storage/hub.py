"""Model folders by name: a local folder, or a Hugging Face hub name that is downloaded."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from textmill.errors import TextmillError, warn
from textmill.storage.remote_folders import fetch, first_line, is_url

HUB_SCHEME = "hf://"
CONFLICT = 409
"""The HTTP status of a repository that exists already."""
OLD_FILES = ["*.safetensors", "*.safetensors.index.json", "*.gguf", "*.onnx", "*.pt", "*.bin"]
"""Weights of an earlier export that a new one replaces."""
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


MARKS = ("config.json", "adapter_config.json", "tokenizer.json", "vocab.json", "vocab.txt", "run.yaml")
"""Files of which a folder behind a URL has at least one, if it has a model or a tokenizer."""
OWN_MARKS = (*MARKS, "manifest.json", "step-*", "*/run.yaml", "*/*/run.yaml", "textmill.yaml", "*/textmill.yaml")
"""What shows that a local folder is no owner of models on the hub, but has models and runs itself."""
SHOWN_FOLDERS = 8
"""Folders that an error names."""


def find_model_folder(name: str, patterns: list[str] = MODEL_FILES) -> Path:
    """The local folder of a model; from the hub only the files in `patterns` are downloaded, never pickles."""
    if is_url(name):
        return _fetch_model(name, None if patterns is MODEL_FILES else patterns)
    if Path(name).is_dir():
        return Path(name)
    if Path(name).is_file():
        raise TextmillError(
            f"{name}: is a file; turn it into a model folder first: textmill import {shlex.quote(name)} FOLDER"
        )
    if not HUB_NAME.match(name):
        raise TextmillError(
            f"{name}: no such folder; use a run, a checkpoint, a Hugging Face model folder or a hub name"
        )
    parent = Path(name).parent
    if "/" in name and any(any(parent.glob(mark)) for mark in OWN_MARKS):  # a typing error: nothing is sent to the hub
        found = ", ".join(sorted(path.name for path in parent.iterdir() if path.is_dir())[:SHOWN_FOLDERS])
        raise TextmillError(f"{name}: no such folder; {parent} has {found or 'no folders'}; check the name")
    try:
        from huggingface_hub import snapshot_download  # importing it takes a second
    except ImportError:
        raise TextmillError(
            f"{name}: no such folder; a download from the hub needs huggingface_hub; run: pip install 'textmill[hf]'"
        ) from None
    if "/" in name and parent.is_dir():
        warn(f"{name}: no such folder in {parent}; using the hub's")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the client raises many types: offline, not found, gated
        raise TextmillError(
            f"{name}: no such folder here, so it was looked up on the Hugging Face hub, which failed "
            f"({first_line(error)}); name a local folder as ./{name}, or check the hub's name and the network"
        ) from None


def _fetch_model(url: str, patterns: list[str] | None) -> Path:
    """The local copy of a model behind a URL, or of the files that `patterns` name."""
    folder = fetch(url, patterns)
    steps = sorted(path.name for path in folder.glob("step-*")) if folder.is_dir() else []
    if folder.is_dir() and not steps and not any((folder / name).is_file() for name in MARKS):
        raise TextmillError(f"{url}: not a model; its folder has no {', '.join(MARKS)}")
    return folder


def upload_model(folder: Path, name: str, *, replace: bool) -> None:
    """Copy a folder to the hub in one commit; a new repository is private. The token is that of the environment.

    An existing repository is written to only with `replace`; its weights are removed in the same commit.
    """
    if not HUB_NAME.match(name) or "/" not in name:
        raise TextmillError(f"export.folder: {HUB_SCHEME}{name} is no name of the hub; write {HUB_SCHEME}OWNER/NAME")
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise TextmillError(
            f"{HUB_SCHEME}{name}: the hub needs huggingface_hub; run: pip install 'textmill[hf]'"
        ) from None
    try:
        hub = HfApi()
        hub.create_repo(name, private=True, exist_ok=replace)
        hub.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Export from textmill", delete_patterns=OLD_FILES
        )
    except Exception as error:  # the client raises many types: no token, no right, offline
        if getattr(getattr(error, "response", None), "status_code", None) == CONFLICT:
            raise TextmillError(
                f"{HUB_SCHEME}{name}: exists already; name another one, or add --force to write a commit into it"
            ) from None
        raise TextmillError(
            f"{HUB_SCHEME}{name}: cannot be written ({first_line(error)}); check the name, and the token in HF_TOKEN"
        ) from None
