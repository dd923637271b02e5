"""GGUF, the file of llama.cpp and Ollama: a model with its own vocabulary, through the package gguf."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import ExportConfig
from textmill.conversion import gguf_gpt2, gguf_llama
from textmill.conversion.gguf_tokenizer import keys_of, tokenizer_of
from textmill.conversion.model import Array, Files, Hints, Model, collect_weights, require_family
from textmill.conversion.ollama import modelfile
from textmill.errors import TextmillError, warn
from textmill.storage.files import manifest_entry, write_text
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16", "q8_0", "q4_0")
TYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
FILE_TYPES = {
    "fp32": "ALL_F32",
    "bf16": "MOSTLY_BF16",
    "fp16": "MOSTLY_F16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
}
BLOCK = 32
"""Values that share a scale in a quantised type; rows of another length are written in F16."""
MAGIC = b"GGUF"
EMBEDDING = "token_embd.weight"
KEPT = ("position_embd.weight", "rope_freqs.weight")
"""Matrices and vectors that stay in F32."""
LAYOUTS: dict[str, Any] = {"gpt2": gguf_gpt2, "llama": gguf_llama}
"""How the models of each family are stored."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write NAME.gguf and a Modelfile for Ollama."""
    gguf = _package()
    shape = model.shape
    require_family(shape, "gguf", *LAYOUTS)
    architecture = LAYOUTS[shape.family].architecture_of(shape)
    if model.tokenizer is None:
        raise TextmillError("export.kind: gguf holds the tokenizer, the model has none; put it next to the weights")
    name = re.sub(r"[^\w.-]+", "-", config.name or Path(str(config.folder)).name) or "model"
    path = folder / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    _add_keys(writer, model, gguf, config, name)
    odd = _add_tensors(writer, model, gguf, config.precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    if odd:
        warn(f"{odd} matrices have rows that are no multiple of {BLOCK}; they are written in F16")
    files = {path.name: manifest_entry(path)}
    return files | {"Modelfile": write_text(folder / "Modelfile", modelfile(path.name, shape, model.tokenizer))}


def _add_keys(writer: Any, model: Model, gguf: Any, config: ExportConfig, name: str) -> None:
    shape = model.shape
    writer.add_name(name)
    if config.license:
        writer.add_license(config.license)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    LAYOUTS[shape.family].add_keys(writer, shape)
    writer.add_file_type(getattr(gguf.LlamaFileType, FILE_TYPES[config.precision]))
    if config.precision.startswith("q"):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    assert model.tokenizer is not None
    for key, value in keys_of(model.tokenizer, shape.vocab).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}", value)


def _add_tensors(writer: Any, model: Model, gguf: Any, precision: str) -> int:
    """Add every weight; norms, biases and positions stay in F32. Returns how many matrices could not be quantised."""
    wanted = getattr(gguf.GGMLQuantizationType, TYPES[precision])
    odd = 0
    for name, values in LAYOUTS[model.shape.family].tensors_of(model).items():
        values = np.ascontiguousarray(values, np.float32)
        if values.ndim < 2 or name in KEPT or precision == "fp32":
            writer.add_tensor(name, values)
            continue
        kind = wanted
        if precision.startswith("q") and values.shape[-1] % BLOCK:
            kind = gguf.GGMLQuantizationType.F16
            odd = odd + 1
        if kind == gguf.GGMLQuantizationType.F16 and np.abs(values).max() > np.finfo(np.float16).max:
            raise TextmillError(
                f"'{name}' holds {np.abs(values).max():.4g}, more than fp16 can represent; use bf16 or fp32"
            )
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    return odd


def matches(path: Path) -> bool:
    """A file that begins as GGUF does, or a folder with one."""
    try:
        with open(_file_of(path), "rb") as stream:
            return stream.read(4) == MAGIC
    except (OSError, TextmillError):
        return False


def _file_of(path: Path) -> Path:
    found = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(found) != 1:
        raise TextmillError(f"{path}: has {len(found)} files *.gguf; name one of them")
    return found[0]


def read(path: Path, hints: Hints) -> Model:
    """Read a model; quantised weights are turned into fp32."""
    path = _file_of(path)
    gguf = _package()
    try:
        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package raises what its arithmetic on a damaged file raises
        raise TextmillError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from None
    layouts = {name: layout for layout in LAYOUTS.values() for name in layout.ARCHITECTURES}
    layout = layouts.get(str(keys.get("general.architecture")))
    if layout is None:
        raise TextmillError(
            f"{path}: its architecture is {keys.get('general.architecture')!r}; textmill reads {', '.join(layouts)}"
        )
    if EMBEDDING not in tensors:
        raise TextmillError(f"{path}: has no {EMBEDDING}; the file is damaged, or holds no weights")
    shape = layout.shape_of(keys, tensors, path)
    weights = collect_weights(shape, _named(tensors, shape, layout, gguf, path), str(path))
    tokenizer = open_tokenizer(hints.tokenizer) if hints.tokenizer else tokenizer_of(keys, str(path))
    return Model(shape, weights, tokenizer)


def _named(tensors: dict[str, Any], shape: Any, layout: Any, gguf: Any, path: Path) -> Iterator[Named]:
    for name, tensor in tensors.items():
        if name == gguf_llama.FACTORS:
            continue  # part of the shape
        found = layout.weight_of(name, _values_of(tensor, gguf, path), shape)
        if found is None:
            raise TextmillError(f"{path}: has '{name}', which a {shape.family} does not have")
        yield found


def _values_of(tensor: Any, gguf: Any, path: Path) -> Array:
    try:
        found: Array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        return found.reshape([int(side) for side in tensor.shape][::-1])
    except Exception as error:  # a type that the package cannot turn into numbers, or a damaged size
        raise TextmillError(
            f"{path}: '{tensor.name}' of type {tensor.tensor_type.name} cannot be read ({type(error).__name__}: "
            f"{error}); convert the file to F32, F16, BF16, Q8_0 or Q4"
        ) from None


def _package() -> Any:
    try:
        import gguf
    except ImportError:
        raise TextmillError("gguf: needs the package gguf; run: pip install 'textmill[export]'") from None
    return gguf
