"""A model as transformers opens it: config.json, the tokenizer's files, safetensors or (read only) pickled weights."""

from __future__ import annotations

import itertools
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from textmill.checkpoints.writing import MAX_FILE_BYTES, plan_files
from textmill.config import SIZES, ExportConfig
from textmill.config.sizes import FAMILY_BY_TYPE
from textmill.conversion.llama_like import as_llama
from textmill.conversion.model import Files, Hints, Model, collect_weights, write_texts
from textmill.conversion.model_card import CARD, read_licences
from textmill.conversion.torch_files import read_tensor_tree
from textmill.errors import TextmillError
from textmill.models import hf_config_of, open_family, read_shape, tokenizer_files
from textmill.models.pooling import find_pooling, pooling_files
from textmill.storage.files import read_json, write_bytes, write_json
from textmill.storage.tensor_files import SHARD_INDEX, Named, Precision, encode_safetensors, read_model
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer

PRECISIONS = ("fp32", "bf16", "fp16")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names of precisions in a config.json."""
PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "*.model", "vocab.txt", "encoder.json")


def text_files(shape: Any, tokenizer: TextTokenizer | None, precision: str, card: str | None = None) -> dict[str, str]:
    """Every file except the weights; the chat template is in the tokenizer's files."""
    hf = {**hf_config_of(shape, tokenizer), "dtype": DTYPES[precision]}
    files = {"config.json": json.dumps(hf, indent=2) + "\n"}
    files |= tokenizer_files(shape, tokenizer) if tokenizer else {}
    return {**files, CARD: card} if card else files


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write the folder; the weights in files of at most MAX_FILE_BYTES."""
    precision: Precision = config.precision  # type: ignore[assignment]  # `export` has checked it
    texts = {**model.licences, **text_files(model.shape, model.tokenizer, precision, model.card)}
    if model.pooling is not None:
        texts |= pooling_files(model.pooling, model.shape.width)
        (folder / "1_Pooling").mkdir(exist_ok=True)
    files = write_texts(folder, texts)
    size = 4 if precision == "fp32" else 2
    plan, named = plan_files("model", model.weights.items(), MAX_FILE_BYTES * 4 // size)
    file_of = plan.file_by_tensor()
    for name, part in itertools.groupby(named, lambda one: file_of[one[0]]):
        files[name] = write_bytes(folder / name, encode_safetensors(list(part), precision))
    if len(plan.files) > 1:
        index = plan.index()
        index["metadata"]["total_size"] = index["metadata"]["total_size"] * size // 4
        files[SHARD_INDEX] = write_json(folder / SHARD_INDEX, index)
    return files


def matches(path: Path) -> bool:
    """A folder with a config.json and weights, or a file of weights, whatever its name."""
    if path.is_file():
        return path.suffix == ".safetensors" or (path.suffix == ".bin" and zipfile.is_zipfile(path))
    has_weights = any(any(path.glob(f"*{end}")) for end in (".safetensors", ".bin", ".index.json"))
    return path.is_dir() and (path / "config.json").is_file() and has_weights


def read(path: Path, hints: Hints) -> Model:
    """Read a folder, or a file of torch's weights with any name; pickled weights without running code."""
    folder = path if path.is_dir() else path.parent
    if path.is_file() and not hints.config and not (folder / "config.json").is_file():
        raise TextmillError(f"{path}: has no config.json next to it; import it with --config config.json")
    config = hints.config or folder
    config = config / "config.json" if config.is_dir() else config
    like = as_llama(tree, str(config)) if config.is_file() and isinstance(tree := read_json(config), dict) else None
    if like is not None:
        shape: Any = open_family("llama").shape_of_hf(like[0], str(config))
    else:
        shape = read_hf_shape(hints.config, *SIZES) if hints.config else read_shape(folder)
    is_bare = path.suffix == ".bin" and not path.stem.startswith("pytorch_model")
    named = read_tensor_tree(path) if is_bare and path.is_file() else _read_weights(folder)
    named = named if like is None else like[1](named)
    weights = collect_weights(shape, named, str(path if is_bare else folder))
    where = hints.tokenizer or folder
    has_tokenizer = any(any(folder.glob(name)) for name in TOKENIZER_FILES)
    tokenizer = open_tokenizer(where) if hints.tokenizer or has_tokenizer else None
    card = (folder / CARD).read_text(encoding="utf-8", errors="replace") if (folder / CARD).is_file() else None
    licences = read_licences(folder)
    return Model(shape, weights, tokenizer, card=card, licences=licences, pooling=find_pooling(folder))


def read_hf_shape(path: Path, *families: str) -> Any:
    """The shape in a config.json, named as the file or its folder, of a model of one of these families."""
    path = path / "config.json" if path.is_dir() else path
    hf = read_json(path)
    kind = hf.get("model_type", families[0]) if isinstance(hf, dict) else None
    family = FAMILY_BY_TYPE.get(kind, kind) if isinstance(kind, str) else None
    if family not in families:
        raise TextmillError(
            f"{path}: not the config.json of a {' or '.join(families)} (model_type is {kind!r}); "
            "name the one that the model was built with"
        )
    return open_family(family).shape_of_hf(hf, str(path))


def _read_weights(folder: Path) -> Iterator[Named]:
    if any(folder.glob("*.safetensors")) or not any(folder.glob("pytorch_model*.bin*")):
        yield from read_model(folder)
        return
    names = [PICKLE]
    if (folder / PICKLE_INDEX).is_file():
        tree = read_json(folder / PICKLE_INDEX)
        listed = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(listed, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in listed.values()
        ):
            raise TextmillError(f"{folder / PICKLE_INDEX}: has no weight_map from weights to files of this folder")
        names = sorted(set(listed.values()))
    for name in names:
        if not (folder / name).is_file():
            raise TextmillError(f"{folder}: lacks the file {name}; copy all files of the model")
        yield from read_tensor_tree(folder / name)
