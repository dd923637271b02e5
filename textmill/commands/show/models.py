"""Prints a model folder for people to read: a checkpoint, an adapter, an exported or a Hugging Face model."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from textmill.checkpoints.adapters import find_base, is_adapter, tokenizer_folder
from textmill.checkpoints.folders import Checkpoint
from textmill.commands.show.bars import print_bars
from textmill.models import read_shape, weights_of
from textmill.storage.files import format_path, read_json
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

WEIGHT_FILES = ("*.safetensors", "*.bin")


def show_model(folder: Path) -> None:
    """Print what a model folder holds: shape, parameters by part, files, training progress, tokenizer."""
    shape = read_shape(folder)
    kind = "adapter" if is_adapter(folder) else "model"
    print(f"{format_path(folder)}: {kind} of family {shape.family}, {shape.parameters:,} parameters")
    if is_adapter(folder):
        print(f"  base model: {format_path(find_base(folder))}")
    names = [name for name in shape.__dataclass_fields__ if name != "family"]
    print("  " + ", ".join(f"{name} {getattr(shape, name)}" for name in names))
    sizes = {path.name: path.stat().st_size for pattern in WEIGHT_FILES for path in sorted(folder.glob(pattern))}
    for name, size in sizes.items():
        print(f"  {name}: {size / 1e6:,.1f} MB")
    _print_progress(folder)
    if (tokenizer_folder(folder) / "tokenizer.json").is_file():
        tokenizer = open_tokenizer(tokenizer_folder(folder))
        print(f"  tokenizer: {tokenizer.vocab:,} entries, end of text is token {tokenizer.end}")
    parts: Counter[str] = Counter()
    for weight in weights_of(shape):
        parts[re.sub(r"\.\d+\.", ".*.", weight.stem.removesuffix(".bias"))] += weight.size
    print_bars("parameters by part, summed over blocks", dict(parts), max_rows=20)


def _print_progress(folder: Path) -> None:
    if not (folder / "progress.json").is_file():
        return
    progress = read_json(folder / "progress.json")
    checkpoint = Checkpoint(folder, progress["step"], progress)
    valid = "" if checkpoint.valid_loss is None else f", valid loss {checkpoint.valid_loss:.4f}"
    loss = float.fromhex(progress["loss"])
    print(f"  step {progress['step']:,}: {progress['tokens']:,} tokens seen, train loss {loss:.4f}{valid}")
    for change in progress.get("changes", []):
        print(f"  changed after step {change['step']:,}: {change['change']}")
