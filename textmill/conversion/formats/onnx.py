"""ONNX: a GPT-2 or Llama as a graph with past key values, or a BERT with its heads, through the package onnx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import ExportConfig
from textmill.conversion.formats.hf import read_hf_shape, text_files
from textmill.conversion.model import Files, Hints, Model, check_layers, collect_weights, require_family, write_texts
from textmill.conversion.onnx_graph import FAMILIES, IR_VERSION, OPSET, Graph, build_nodes
from textmill.errors import TextmillError
from textmill.models.bert.family import shape_with_weights
from textmill.storage.files import manifest_entry

PRECISIONS = ("fp32", "fp16")
FILE = "model.onnx"
DATA = "model.onnx.data"
LARGE = 1_000_000_000
"""Above so many bytes the weights are in a file of their own, because the graph's file is limited to 2 GB."""
INTEGERS = ("_ids", "_mask")
"""How the names of inputs end that have whole numbers."""
HALF = ".fp16"
"""The ending of weights that are stored in fp16; they are turned into fp32 when the graph is loaded."""


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write model.onnx, and config.json and the tokenizer's files for the programs that run it."""
    onnx = _package()
    shape = model.shape
    require_family(shape, "onnx", *FAMILIES)
    graph = Graph(onnx.helper)
    half = config.precision == "fp16"
    weights = []
    for name, values in model.weights.items():
        stored = np.ascontiguousarray(values, np.float32)
        if half and np.abs(stored).max(initial=0) > np.finfo(np.float16).max:
            raise TextmillError(f"'{name}' is more than fp16 can represent; use fp32")
        if half:
            stored = stored.astype(np.float16)
            graph.add("Cast", name + HALF, name=name, to=onnx.TensorProto.FLOAT)
        weights.append(onnx.numpy_helper.from_array(stored, name + HALF if half else name))
    interface = build_nodes(graph, shape)
    weights += [onnx.numpy_helper.from_array(values, name) for name, values in graph.constants.items()]
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(graph.nodes, shape.family, *_interface(onnx, *interface), weights),
        ir_version=IR_VERSION,
        opset_imports=[onnx.helper.make_opsetid("", OPSET)],
        producer_name="textmill",
    )
    large = sum(len(weight.raw_data) for weight in weights) > LARGE
    onnx.save_model(proto, folder / FILE, save_as_external_data=large, location=DATA)
    onnx.checker.check_model(folder / FILE)
    files = write_texts(folder, text_files(shape, model.tokenizer, config.precision))
    return files | {name: manifest_entry(folder / name) for name in (FILE, DATA) if (folder / name).is_file()}


def _interface(onnx: Any, *sizes_by_name: dict[str, list[int | str]]) -> Iterator[list[Any]]:
    """The inputs and the outputs with their types and sizes; ids and masks are whole numbers."""
    value = onnx.helper.make_tensor_value_info
    integer, number = onnx.TensorProto.INT64, onnx.TensorProto.FLOAT
    for group in sizes_by_name:
        yield [value(name, integer if name.endswith(INTEGERS) else number, sizes) for name, sizes in group.items()]


def matches(path: Path) -> bool:
    """A folder with model.onnx, or such a file, next to a config.json."""
    folder = path if path.is_dir() else path.parent
    named = (path / FILE).is_file() if path.is_dir() else path.suffix == ".onnx"
    return named and (folder / "config.json").is_file()


def read(path: Path, hints: Hints) -> Model:
    """Read the weights of a file that textmill wrote; onnxruntime runs the graph (readers.py)."""
    onnx = _package()
    file = path / FILE if path.is_dir() else path
    config = hints.config or file.parent
    shape = read_hf_shape(config, *FAMILIES)
    try:
        proto = onnx.load(file)
        found = {one.name.removesuffix(HALF): onnx.numpy_helper.to_array(one) for one in proto.graph.initializer}
    except Exception as error:  # protobuf and the package raise many types
        raise TextmillError(f"{file}: not a readable ONNX file ({type(error).__name__}: {error})") from None
    check_layers(shape, len(found), str(file))
    if shape.family == "bert":
        shape = shape_with_weights(shape, found)
    wanted = {weight.name for weight in shape.weights()}
    named = [(name, values.astype(np.float32)) for name, values in found.items() if name in wanted]
    weights = collect_weights(shape, named, str(file))
    return Model(shape, weights, hints.open_tokenizer(file.parent))


def _package() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.numpy_helper
    except ImportError:
        raise TextmillError("onnx: needs the package onnx; run: pip install 'textmill[export]'") from None
    return onnx
