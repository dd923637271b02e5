"""A GPT-2, Llama, Qwen2, Qwen3 or BERT in a GGUF file: its keys, the names of its tensors and their layout.

llama.cpp's `llama` turns neighbouring channels by one angle, transformers the channels i and D/2 + i. So the rows of
queries and keys are stored in another order. Its `qwen2` and `qwen3` have transformers' order.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from textmill.conversion.model import Array, Model
from textmill.errors import TextmillError, warn
from textmill.models import open_family
from textmill.models.llama.rotary import llama3_factors

FAMILIES = {"gpt2": "gpt2", "llama": "llama", "qwen2": "llama", "qwen3": "llama", "bert": "bert"}
"""llama.cpp's names of the kinds of models that are read and written, and our families."""
HEAD = "lm_head.weight"
OUTPUT = "output.weight"
EMBEDDING = "token_embd.weight"
TYPES = "token_types.weight"
FACTORS = "rope_freqs.weight"
NUMBERS = {
    "gpt2": {
        "block_count": "n_layer",
        "context_length": "n_positions",
        "embedding_length": "n_embd",
        "feed_forward_length": "n_inner",
        "attention.head_count": "n_head",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    },
    "llama": {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    },
    "bert": {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_epsilon": "layer_norm_eps",
    },
}
"""For each family, keys of the file below the architecture's name, and those of a config.json."""
SCALING = "textmill.rope_scaling"
"""The scaling of rotary positions as config.json has it: llama.cpp's keys do not have all of its numbers."""
SCALING_NUMBERS = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
YARN_FIXED = ("attn_factor", "yarn_attn_factor", "yarn_ext_factor")
"""Keys that llama.cpp multiplies into a scaling in its own way; 1 changes nothing."""
LLAMA3 = [
    {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for factor in (8.0, 32.0)
]
"""The scalings of the published Llama 3 models, of which a file has the factors only."""


ACTIVATIONS = {"gpt2": ("gelu_new", "hf or onnx"), "bert": ("gelu", "hf or onnx")}
"""The activation that llama.cpp computes (of BERT, in its tanh form), and formats for others; all else has silu."""


def plain_encoder(model: Model) -> Model:
    """A BERT without its heads, which llama.cpp does not have; another model as it is."""
    if model.shape.family != "bert":
        return model
    shape = replace(model.shape, masked_head=False, pair_head=False, pooler=False, task="", labels=())
    names = [weight.name for weight in shape.weights()]
    if len(names) < len(model.weights):
        warn("llama.cpp computes the embeddings of a bert; the file has the encoder without its heads")
    return replace(model, shape=shape, weights={name: model.weights[name] for name in names})


def architecture_of(shape: Any) -> str:
    """llama.cpp's name of the kind of model; an error if it has none that computes the same."""
    kind: str = shape.family if shape.family in ("gpt2", "bert") else shape.model_type
    activation, others = ACTIVATIONS.get(kind, ("silu", "hf"))
    if kind == "bert" and shape.norm != "post":
        raise TextmillError("export.kind: llama.cpp's bert has LayerNorms after attention and MLP only; use hf or onnx")
    if shape.activation != activation:
        raise TextmillError(
            f"export.kind: llama.cpp computes a {kind} with {activation}, this model has {shape.activation}; "
            f"use {others}"
        )
    if kind == "qwen3" and shape.qkv_bias:
        raise TextmillError("export.kind: llama.cpp's qwen3 has no biases, this model has some; use hf")
    scaling = _scaling_of_shape(shape)
    options = scaling.keys() - {"rope_type", "factor", "original_max_position_embeddings"}
    if scaling.get("rope_type") == "yarn" and options:
        raise TextmillError(f"export.kind: gguf has no place for yarn's {', '.join(sorted(options))}; use hf")
    return kind


def _scaling_of_shape(shape: Any) -> dict[str, Any]:
    scaling: dict[str, Any] = json.loads(getattr(shape, "rotary_scaling", None) or "{}")
    return scaling


def add_keys(writer: Any, shape: Any) -> None:
    """The numbers of the shape."""
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    if shape.family in ("gpt2", "bert"):
        writer.add_layer_norm_eps(shape.epsilon)
        if shape.family == "bert":
            writer.add_causal_attention(False)
        return
    writer.add_vocab_size(shape.vocab)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_rope_dimension_count(shape.head_width)
    writer.add_rope_freq_base(shape.rotary_base)
    if not shape.rotary_scaling:
        return
    scaling = _scaling_of_shape(shape)
    writer.add_string(SCALING, shape.rotary_scaling)
    if scaling["rope_type"] in ("linear", "yarn"):
        writer.add_string(f"{shape.model_type}.rope.scaling.type", scaling["rope_type"])
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def gguf_names(shape: Any, kind: str, gguf: Any) -> dict[str, str]:
    """The file's name of every weight, from the table of the package, which has transformers' names.

    model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight
    """
    architecture = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    table = gguf.get_tensor_name_map(architecture, shape.layers)
    names = [*(weight.name for weight in shape.weights()), *([] if kind == "bert" else [HEAD])]
    return {name: table.get_name(name.removeprefix("bert."), (".weight", ".bias")) for name in names}


def tensors_of(model: Model, kind: str, gguf: Any) -> dict[str, Array]:
    """Every tensor under llama.cpp's name and in its layout."""
    shape = model.shape
    names = gguf_names(shape, kind, gguf)
    tensors = {names[name]: change_layout(name, values, shape, to_file=True) for name, values in model.weights.items()}
    if kind == "gpt2":
        # A tied head could be left out, but older builds of llama.cpp do not open such a file.
        tensors.setdefault(OUTPUT, tensors[EMBEDDING])
    scaling = _scaling_of_shape(shape)
    if scaling.get("rope_type") == "llama3":
        tensors[FACTORS] = _factors(shape.head_width, shape.rotary_base, scaling)
    return tensors


def change_layout(name: str, values: Array, shape: Any, *, to_file: bool) -> Array:
    """A weight in the layout of the file, or back: matrices of GPT-2 are turned, queries and keys of a Llama reordered.

    Channel (half, i) of a head becomes (i, half); with D / 2 halves it is undone. A head of width 6 with 2 halves: rows
    0 1 2 3 4 5 become 0 3 1 4 2 5; these with 3 halves become 0 1 2 3 4 5 again.
    """
    if shape.family == "gpt2":
        is_turned = any(weight.transposed for weight in shape.weights() if weight.name == name)
        return np.ascontiguousarray(values.T) if is_turned else values
    if shape.family == "bert":
        return values
    part = name.split(".")[-2]
    heads = {"q_proj": shape.heads, "k_proj": shape.kv_heads}.get(part) if shape.model_type == "llama" else None
    if heads is None or len(values) != heads * shape.head_width:
        return values
    halves = 2 if to_file else shape.head_width // 2
    by_half = values.reshape(heads, halves, -1, *values.shape[1:])
    return np.ascontiguousarray(by_half.swapaxes(1, 2)).reshape(values.shape)


def _factors(head_width: int, base: float, scaling: dict[str, Any]) -> Array:
    powers_D = np.float32(base) ** (np.arange(0, head_width, 2, dtype=np.float32) / np.float32(head_width))
    return llama3_factors(np.float32(1) / powers_D, scaling)


def shape_of(keys: dict[str, Any], tensors: dict[str, Any], path: Path) -> Any:
    """The shape of a file."""
    kind = keys["general.architecture"]
    family = FAMILIES[kind]
    hf = {hf_key: keys.get(f"{kind}.{gguf_key}") for gguf_key, hf_key in NUMBERS[family].items()}
    for key in ("layer_norm_epsilon", "rms_norm_eps"):
        if isinstance(hf.get(key), float):
            hf[key] = float(f"{hf[key]:.6g}")  # the file has 32 bits of it
    hf = {key: value for key, value in hf.items() if value is not None} | {
        "model_type": kind,
        "vocab_size": int(tensors[EMBEDDING].shape[-1]),
        "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
        "tie_word_embeddings": OUTPUT not in tensors,
    }
    if family == "gpt2":
        hf |= {"activation_function": "gelu_new", "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        hf["tie_word_embeddings"] |= np.array_equal(
            tensors.get(OUTPUT, tensors[EMBEDDING]).data, tensors[EMBEDDING].data
        )
        return open_family(family).shape_of_hf(hf, str(path))
    if family == "bert":
        types = tensors[TYPES].shape[-1] if TYPES in tensors else 0
        hf |= {"architectures": ["BertModel"], "tie_word_embeddings": True, "type_vocab_size": int(types)}
        encoder: Any = open_family(family).shape_of_hf(hf, str(path))
        return replace(encoder, pooler=False)
    hf |= {"attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    hf["rope_scaling"] = _scaling_of(keys, kind, tensors, hf, path)
    shape: Any = open_family(family).shape_of_hf(hf, str(path))
    rotated = keys.get(f"{kind}.rope.dimension_count")
    if rotated not in (None, shape.head_width):
        raise TextmillError(
            f"{path}: rope.dimension_count is {rotated}; textmill turns all {shape.head_width} channels of a head"
        )
    return shape


def _scaling_of(
    keys: dict[str, Any], kind: str, tensors: dict[str, Any], hf: dict[str, Any], path: Path
) -> dict[str, Any] | None:
    """The scaling of rotary positions, from textmill's key or from llama.cpp's."""
    if isinstance(text := keys.get(SCALING), str):
        try:
            textmill_scaling = json.loads(text)
        except ValueError:
            raise TextmillError(f"{path}: {SCALING} is no JSON; the file is damaged") from None
        return textmill_scaling if isinstance(textmill_scaling, dict) else None
    if FACTORS in tensors:
        factors = np.asarray(tensors[FACTORS].data, np.float32).reshape(-1)
        for scaling in LLAMA3:
            if np.allclose(factors, _factors(2 * len(factors), hf.get("rope_theta", 1e4), scaling), rtol=1e-3):
                return scaling
        raise TextmillError(
            f"{path}: {FACTORS} is no scaling of a published Llama 3; convert the model's folder instead"
        )
    name = keys.get(f"{kind}.rope.scaling.type", "none")
    factor = keys.get(f"{kind}.rope.scaling.factor")
    if name == "none" or (name == "linear" and factor in (None, 0.0, 1.0)):
        return None
    for key in YARN_FIXED:
        if (value := keys.get(f"{kind}.rope.scaling.{key}")) not in (None, 1.0):
            raise TextmillError(f"{path}: rope.scaling.{key} is {value}; convert the model's folder instead")
    options = {hf_key: keys.get(f"{kind}.rope.scaling.{gguf_key}") for gguf_key, hf_key in SCALING_NUMBERS.items()}
    return {"rope_type": name, "factor": factor, **{key: value for key, value in options.items() if value}}
