"""Activations of MLPs: transformers' names and ours."""

from __future__ import annotations

SAME_ACTIVATION = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
    "relu2": "relu2",
}
"""Transformers' names of activations and ours."""
GELUS = ("gelu_new", "gelu")
"""Activations that fused kernels, fp8 and most other tools know."""
