"""llm.c's model files (gpt2_124M.bin): a header of 256 numbers, then every kind of weight for all layers; read only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import ExportConfig
from textmill.conversion.model import Array, Files, Hints, Model, collect_weights
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

PRECISIONS: tuple[str, ...] = ()
MAGIC = 20240326
HEADER = 256
ITEM_BYTES = {3: 4, 5: 2}
"""Bytes of a number by version: 3 has fp32, 5 has bf16; both have a padded vocabulary."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Not written: llm.c reads Hugging Face folders itself."""
    raise TextmillError("export.kind: llmc is only read")


def matches(path: Path) -> bool:
    """A file that begins with llm.c's number."""
    try:
        with open(path, "rb") as stream:
            return stream.read(4) == MAGIC.to_bytes(4, "little")
    except OSError:
        return False


def read(path: Path, hints: Hints) -> Model:
    """Read a file; padding rows of the vocabulary are dropped."""
    try:
        header = np.fromfile(path, "<i4", HEADER)
        size = path.stat().st_size
    except OSError as error:
        raise TextmillError(f"{path}: not readable ({error})") from None
    if len(header) < HEADER or header[0] != MAGIC or int(header[1]) not in ITEM_BYTES:
        version = int(header[1]) if len(header) > 1 else None
        raise TextmillError(f"{path}: not a model file of llm.c in version 3 or 5 (version {version})")
    positions, vocab, layers, heads, width, rows = map(int, header[2:8])
    hf = {
        "n_layer": layers,
        "n_head": heads,
        "n_embd": width,
        "n_positions": positions,
        "vocab_size": vocab,
        "activation_function": "gelu_new",
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }
    shape = open_family("gpt2").shape_of_hf(hf, str(path))
    if rows < vocab:
        raise TextmillError(f"{path}: its padded vocabulary {rows:,} is smaller than its vocabulary {vocab:,}; damaged")
    item = ITEM_BYTES[int(header[1])]
    tensors = list(_layout(shape, rows))
    expected = HEADER * 4 + item * sum(math.prod(one) for _, _, one in tensors)
    if size != expected:
        raise TextmillError(f"{path}: has {size:,} bytes, its header describes {expected:,}; the file is truncated")
    weights = collect_weights(shape, _named(path, tensors, item), str(path), padded=True)
    return Model(shape, weights, open_tokenizer(hints.tokenizer) if hints.tokenizer else None)


def _layout(shape: Any, rows: int) -> Iterator[tuple[str, bool, tuple[int, ...]]]:
    """Each kind of weight in the file's order: its name (N: of every layer), whether it is a matrix of a block, and its
    size."""
    width = shape.width
    inner = 4 * shape.width
    layers = shape.layers
    yield "transformer.wte.weight", False, (rows, width)
    yield "transformer.wpe.weight", False, (shape.positions, width)
    sizes = {"attn.c_attn": (3 * width, width), "attn.c_proj": (width, width)}
    sizes |= {"mlp.c_fc": (inner, width), "mlp.c_proj": (width, inner)}
    for stem in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"):
        size = sizes.get(stem, (width,))
        yield f"transformer.h.N.{stem}.weight", len(size) == 2, (layers, *size)
        yield f"transformer.h.N.{stem}.bias", False, (layers, size[0])
    yield "transformer.ln_f.weight", False, (width,)
    yield "transformer.ln_f.bias", False, (width,)


def _named(path: Path, tensors: list[tuple[str, bool, tuple[int, ...]]], item: int) -> Iterator[Named]:
    data = np.memmap(path, np.uint8, "r")
    start = HEADER * 4
    for name, matrix, size in tensors:
        values = _decode(data[start : start + math.prod(size) * item], item).reshape(size)
        start += math.prod(size) * item
        if "h.N." not in name:
            yield name, values
            continue
        for layer, one in enumerate(values):
            yield name.replace("h.N.", f"h.{layer}."), np.ascontiguousarray(one.T) if matrix else one


def _decode(data: Any, item: int) -> Array:
    if item == 4:
        found: Array = np.frombuffer(data.tobytes(), "<f4").astype(np.float32, copy=False)
        return found
    return (np.frombuffer(data.tobytes(), "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
