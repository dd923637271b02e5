"""A GPT-2 in a GGUF file: its keys, the names of its tensors and their layout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from textmill.conversion.gguf_names import read_name
from textmill.conversion.model import Array, Model
from textmill.errors import TextmillError
from textmill.models import open_family, weights_of

ARCHITECTURES = ("gpt2",)
NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "lm_head": "output",
}
"""The family's names of modules, of a block without `transformer.h.N`, and llama.cpp's."""
OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"
NUMBERS = {
    "block_count": "n_layer",
    "context_length": "n_positions",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
}
"""Keys of the file below `gpt2.`, and those of a config.json."""


def architecture_of(shape: Any) -> str:
    """llama.cpp's name of the kind of model; an error if it has none that computes the same."""
    if shape.activation != "gelu_new":
        raise TextmillError(
            f"export.kind: llama.cpp computes a GPT-2 with gelu_new, this model has {shape.activation}; use hf or onnx"
        )
    return ARCHITECTURES[0]


def add_keys(writer: Any, shape: Any) -> None:
    """The numbers of the shape that only this kind of model has."""
    writer.add_layer_norm_eps(shape.epsilon)


def tensors_of(model: Model) -> dict[str, Array]:
    """Every tensor under llama.cpp's name and in its layout."""
    transposed = {weight.name: weight.transposed for weight in weights_of(model.shape)}
    found = {_their_name(name): values.T if transposed.get(name) else values for name, values in model.weights.items()}
    # A tied head could be left out, but older builds of llama.cpp do not open such a file.
    found.setdefault(OUTPUT, found[EMBEDDING])
    return found


def _their_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", stem)
    return f"blk.{block[1]}.{NAMES[block[2]]}.{ending}" if block else f"{NAMES[stem]}.{ending}"


def shape_of(keys: dict[str, Any], tensors: dict[str, Any], path: Path) -> Any:
    """The shape of a file."""
    hf = {ours: keys.get(f"gpt2.{theirs}") for theirs, ours in NUMBERS.items()}
    hf |= {
        "vocab_size": int(tensors[EMBEDDING].shape[-1]),
        "activation_function": "gelu_new",
        "layer_norm_epsilon": keys.get("gpt2.attention.layer_norm_epsilon", 1e-5),
        "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": _is_tied(tensors),
    }
    if isinstance(epsilon := hf["layer_norm_epsilon"], float):
        hf["layer_norm_epsilon"] = float(f"{epsilon:.6g}")  # the file has 32 bits of it
    return open_family("gpt2").shape_of_hf(hf, str(path))


def _is_tied(tensors: dict[str, Any]) -> bool:
    return OUTPUT not in tensors or np.array_equal(tensors[OUTPUT].data, tensors[EMBEDDING].data)


def weight_of(name: str, values: Array, shape: Any) -> tuple[str, Array] | None:
    """A tensor under the family's name and in its layout; None if a GPT-2 has no such tensor."""
    if (found := read_name(name, NAMES)) is None:
        return None
    block, module, ending = found
    full = f"{module}.{ending}" if block is None else f"transformer.h.{block}.{module}.{ending}"
    transposed = any(weight.transposed for weight in weights_of(shape) if weight.name == full)
    return full, np.ascontiguousarray(values.T) if transposed and values.ndim == 2 else values
