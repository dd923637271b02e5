"""nanoGPT's ckpt.pt: model_args, and weights under GPT-2's names with matrices as outputs x inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import ExportConfig
from textmill.conversion.model import Files, Hints, Model, check_layers, collect_weights, require_family, write_texts
from textmill.conversion.torch_files import Tree, named_tensors, read_tree, to_tensor, write_torch_file
from textmill.errors import TextmillError, warn
from textmill.models import open_family, weights_of
from textmill.models.hf_config import GELUS
from textmill.storage.tensor_files import Named

PRECISIONS = ("fp32",)
FILE = "ckpt.pt"
NUMBERS = {"n_layer": "layers", "n_head": "heads", "n_embd": "width", "block_size": "positions", "vocab_size": "vocab"}
"""nanoGPT's numbers and ours."""
COMPILED = "_orig_mod."
"""What torch.compile puts before every name."""
EPSILON = 1e-5


def write(model: Model, folder: Path, config: ExportConfig) -> Files:
    """Write ckpt.pt, which nanoGPT's sample.py and train.py (init_from=resume) open, and the tokenizer's files."""
    shape = model.shape
    require_family(shape, "nanogpt", "gpt2")
    if shape.activation not in GELUS:
        raise TextmillError(f"export.kind: nanogpt has gelu only, the model has {shape.activation}; use hf or onnx")
    if shape.untied:
        raise TextmillError("export.kind: nanogpt has a tied head only, the model's is untied; use hf, gguf or onnx")
    if shape.inner != 4 * shape.width or shape.epsilon != EPSILON:
        raise TextmillError(
            f"export.kind: nanogpt has an MLP of 4 x width and epsilon {EPSILON}; the model has an MLP of "
            f"{shape.inner:,} for width {shape.width:,}, and epsilon {shape.epsilon}"
        )
    if shape.activation != "gelu":
        warn(f"nanoGPT computes gelu by erf, this model {shape.activation}; its logits differ slightly there")
    transposed = {weight.name: weight.transposed for weight in weights_of(shape)}
    state = {name: to_tensor(values.T if transposed[name] else values) for name, values in model.weights.items()}
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    args = {key: getattr(shape, name) for key, name in NUMBERS.items()}
    args |= {"bias": True, "dropout": shape.residual_dropout}
    files = {FILE: write_torch_file(folder / FILE, {"model": state, "model_args": args, "iter_num": 0, "config": {}})}
    texts = model.tokenizer.files(shape.positions) if model.tokenizer else {}
    return files | write_texts(folder, texts)


def matches(path: Path) -> bool:
    """A file ckpt.pt, or a folder with one."""
    return (path / FILE).is_file() if path.is_dir() else path.name.startswith("ckpt") and path.suffix == ".pt"


def read(path: Path, hints: Hints) -> Model:
    """Read a ckpt.pt; weights without biases get biases of zero."""
    path = path / FILE if path.is_dir() else path
    tree = read_tree(path)
    args = tree.get("model_args")
    state = tree.get("model")
    if not isinstance(args, dict) or not isinstance(state, dict):
        raise TextmillError(f"{path}: has no model_args and model; it is not a checkpoint of nanoGPT")
    shape = _shape_of(args, hints, path)
    check_layers(shape, len(state), str(path))
    transposed = {weight.name: weight.transposed for weight in weights_of(shape)}
    weights = collect_weights(shape, _named(state, transposed, shape), str(path), padded=hints.vocab is not None)
    return Model(shape, weights, hints.open_tokenizer(path.parent))


def _shape_of(args: Tree, hints: Hints, path: Path) -> Any:
    hf = {key.replace("block_size", "n_positions"): args.get(key) for key in NUMBERS}
    hf |= {"vocab_size": hints.vocab or args.get("vocab_size"), "activation_function": hints.activation or "gelu"}
    dropout = args.get("dropout", 0.0)
    hf |= {"embd_pdrop": dropout, "attn_pdrop": dropout, "resid_pdrop": dropout, "layer_norm_epsilon": EPSILON}
    return open_family("gpt2").shape_of_hf(hf, str(path))


def _named(state: Tree, transposed: dict[str, bool], shape: Any) -> Iterator[Named]:
    found = {name.removeprefix(COMPILED): values for name, values in named_tensors(state)}
    for name, values in found.items():
        yield name, values.T if transposed.get(name) and values.ndim == 2 else values
    for weight in weights_of(shape):  # model_args has bias=False
        if weight.name.endswith(".bias") and weight.name not in found:
            yield weight.name, np.zeros(weight.shape, np.float32)
