"""Hugging Face datasets by their hub names: fetched by the library, read as the Arrow files of its cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from textmill.corpus.source import Source
from textmill.errors import TextmillError


def sources_of(word: str) -> Iterator[Source]:
    """`hf:NAME[:CONFIG][:SPLIT]`: fetched once by the library, read from its cache; without a split, all of them."""
    name, _, rest = word.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    if not name or not re.fullmatch(r"[\w.-]*", split):
        raise TextmillError(
            f"corpus.sources: '{word}' is not understood; say hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT with a whole split"
        )
    for part, dataset in sorted(_load(word, name, config, split).items()):
        files = [file["filename"] for file in dataset.cache_files]
        for number, path in enumerate(files):
            whole = f"hf:{name}:{config}:{part}"
            yield Source(whole if len(files) == 1 else f"{whole}:{number}", os.path.abspath(path), "arrow")


def _load(word: str, name: str, config: str, split: str) -> dict[str, Any]:
    try:
        import datasets
    except ImportError:
        raise TextmillError(f"corpus.sources: '{word}' needs datasets; run: pip install 'textmill[hf]'") from None
    try:
        found = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as error:  # offline, unknown, gated, a script: each its own kind
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TextmillError(
            f"corpus.sources: {word}: the hub did not give it ({said}); check the name, its config and split, and the network"
        ) from None
    return {split: found} if split else {str(part): found[part] for part in found}
