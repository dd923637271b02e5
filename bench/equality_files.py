"""What bench/equality.py reads: metrics, and digests of documents, token ids and tensors."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLOCK = ("tokens_per_second", "slowest_rank", "slowest_rank_ratio", "mfu", "seconds", "minutes", "memory")
"""Parts of the names of metrics that depend on the machine's load."""
AS_THEY_ARE = (".bin", ".idx", ".npy", ".tfrecord", ".model", ".txt", ".labels")
"""Endings of files whose bytes are the result."""
LEFT_OUT = ("card", "checkpoint", "seconds", "predictions", "precision", "device")
"""Keys of a command's JSON with paths and times, and what older commits printed twice."""


def read_printed(printed: str) -> Any:
    """The lines of JSON without times, or the text; paths below the current folder become relative ones."""
    printed = printed.replace(f"{Path.cwd()}/", "")
    try:
        return [_without(json.loads(line)) for line in printed.splitlines()]
    except json.JSONDecodeError:
        return printed


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(one) for key, one in value.items() if key not in LEFT_OUT}
    return [_without(one) for one in value] if isinstance(value, list) else value


def read_run(run: Path) -> dict[str, Any]:
    """All logged metrics, and digests of the last checkpoint's tensors."""
    metrics: dict[str, list[Any]] = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        for key, value in json.loads(line).items():
            if not any(part in key for part in CLOCK):
                metrics.setdefault(key, []).append(value)
    last = max(path for path in run.glob("step-*") if path.is_dir())
    return {"metrics": metrics, **{Path(path).name: value for path, value in read_files(last).items()}}


def read_files(place: Path) -> dict[str, Any]:
    """A digest of the content of a file, or of each file in a folder that has documents, token ids or tensors."""
    if place.is_file():
        return {str(place): digest_bytes(place.read_bytes())}
    found = {str(path): digest_file(path) for path in sorted(place.rglob("*")) if path.is_file()}
    return {path: digest for path, digest in found.items() if digest is not None}


def digest_file(path: Path) -> str | dict[str, str] | None:
    """A digest of the values in a file, or of each column of a table; None for other kinds of files."""
    if path.suffix in TENSORS:
        return digest_tensors(TENSORS[path.suffix](path))
    if path.suffix in AS_THEY_ARE:
        return digest_bytes(path.read_bytes())
    if path.name in ("tokenizer.json", "vocab.json"):
        return digest_bytes(json.dumps(json.loads(path.read_text()), sort_keys=True).encode())
    if path.suffix == ".parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(path).to_pydict()
        return {name: digest_bytes(json.dumps(column).encode()) for name, column in table.items()}
    return None


def digest_bytes(data: bytes) -> str:
    """SHA-256 as text; paths below the current folder become relative ones."""
    return hashlib.sha256(data.replace(f"{Path.cwd()}/".encode(), b"")).hexdigest()


def digest_tensors(tensors: dict[str, Any]) -> str:
    """A digest of names, types, shapes and bytes, in the order of the names."""
    import torch

    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        if isinstance(values, torch.Tensor):
            values = values.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(values.tobytes())
    return digest.hexdigest()


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(path)


def _read_torch(path: Path) -> dict[str, Any]:
    """All tensors of a file of torch.save; Megatron's have a Namespace too."""
    import torch

    with torch.serialization.safe_globals([argparse.Namespace]):
        return dict(_flatten("", torch.load(path, weights_only=True)))


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flatten(f"{name}/{key}", one)
    elif hasattr(value, "dtype"):
        yield name, value


def _read_gguf(path: Path) -> dict[str, Any]:
    import gguf

    return {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}


def _read_onnx(path: Path) -> dict[str, Any]:
    import onnx

    return {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}


TENSORS: dict[str, Callable[[Path], dict[str, Any]]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_torch,
    ".gguf": _read_gguf,
    ".onnx": _read_onnx,
}
