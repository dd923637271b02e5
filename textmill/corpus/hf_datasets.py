"""Download Hugging Face datasets and read the Arrow files of their cache."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

from textmill.corpus.source import Source
from textmill.errors import TextmillError


def find_hf_sources(entry: str, setting: str) -> Iterator[Source]:
    """The sources of `hf:NAME[:CONFIG][:SPLIT]`; all splits if none is given. `setting`: where the user gave it."""
    name, _, rest = entry.removeprefix("hf:").partition(":")
    config, _, split = rest.partition(":")
    if not name or not re.fullmatch(r"[\w.-]*", split):
        raise TextmillError(
            f"{setting}: '{entry}' is not valid; write hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT "
            f"(a split without slicing)"
        )
    for split_name, dataset in sorted(_load(f"{setting}: '{entry}'", name, config, split).items()):
        files = [file["filename"] for file in dataset.cache_files]
        for number, path in enumerate(files):
            source_name = f"hf:{name}:{config}:{split_name}"
            yield Source(source_name if len(files) == 1 else f"{source_name}:{number}", os.path.abspath(path), "arrow")


def _load(where: str, name: str, config: str, split: str) -> dict[str, Any]:
    """The dataset of each split; errors begin with `where`."""
    try:
        import datasets
    except ImportError:
        raise TextmillError(f"{where} needs datasets; run: pip install 'textmill[hf]'") from None
    try:
        found = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as error:  # offline, unknown, gated, a script: each raises its own exception
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TextmillError(f"{where}: download failed ({reason}); check the name, config, split and network") from None
    return {split: found} if split else {str(split_name): found[split_name] for split_name in found}
