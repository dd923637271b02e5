"""Named model sizes, as plain numbers."""

from __future__ import annotations

from typing import Any

GPT2 = {"activation": "gelu_new", "dropout": 0.0, "untied": False}
DSGPT2 = {"activation": "gelu", "dropout": 0.1}
LLAMA = {
    "kv_heads": None,
    "head_width": None,
    "activation": "silu",
    "qk_norm": False,
    "qkv_bias": False,
    "rotary_base": 10000.0,
    "untied": False,
    "dropout": 0.0,
    "gated": True,
    "value_embeddings": 0,
    "embedding_residual": False,
    "logit_softcap": 0.0,
    "zero_init": False,
}
"""None: as many heads of keys as of queries, and heads that divide the width."""
BERT = {"positions": 512, "activation": "gelu", "norm": "post", "pair_head": True, "deep_init": False, "dropout": 0.0}

PUBLISHED: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
        "width": 576,
        "inner": 1536,
        "positions": 8192,
        "rotary_base": 1e5,
    },
    "smollm2-360m": {
        "layers": 32,
        "heads": 15,
        "kv_heads": 5,
        "width": 960,
        "inner": 2560,
        "positions": 8192,
        "rotary_base": 1e5,
    },
    "qwen2.5-0.5b": {
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "width": 896,
        "inner": 4864,
        "positions": 32768,
        "rotary_base": 1e6,
        "qkv_bias": True,
    },
    "qwen2.5-1.5b": {
        "layers": 28,
        "heads": 12,
        "kv_heads": 2,
        "width": 1536,
        "inner": 8960,
        "positions": 32768,
        "rotary_base": 1e6,
        "qkv_bias": True,
    },
    "qwen3-0.6b": {
        "layers": 28,
        "heads": 16,
        "kv_heads": 8,
        "head_width": 128,
        "width": 1024,
        "inner": 3072,
        "positions": 32768,
        "rotary_base": 1e6,
        "qk_norm": True,
    },
    "tinyllama-1.1b": {
        "layers": 22,
        "heads": 32,
        "kv_heads": 4,
        "width": 2048,
        "inner": 5632,
        "positions": 2048,
        "untied": True,
    },
    "llama-3.2-1b": {
        "layers": 16,
        "heads": 32,
        "kv_heads": 8,
        "width": 2048,
        "inner": 8192,
        "positions": 8192,
        "rotary_base": 5e5,
    },
}
"""Llama, Qwen2 and Qwen3 models."""

COMMON: dict[str, dict[str, Any]] = {
    "nano": {"layers": 2, "heads": 3, "width": 96, "positions": 256},
    "micro": {"layers": 4, "heads": 4, "width": 256, "positions": 512},
    "mini": {"layers": 8, "heads": 8, "width": 512, "positions": 1024},
    "small": {"layers": 12, "heads": 12, "width": 768, "positions": 1024},
    "medium": {"layers": 24, "heads": 16, "width": 1024, "positions": 1024},
    "large": {"layers": 36, "heads": 20, "width": 1280, "positions": 1024},
    "xl": {"layers": 48, "heads": 25, "width": 1600, "positions": 1024},
}
"""Sizes that gpt2 and llama have, with about as many parameters in both; `small` to `xl` are OpenAI's of GPT-2."""

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        **{name: {**numbers, **GPT2} for name, numbers in COMMON.items()},
        # dsGPT2: erf GELU, short contexts, dropout as its configs leave it.
        "dsgpt2-112m": {"layers": 12, "heads": 12, "width": 768, "positions": 128, **GPT2, "activation": "gelu"},
        "dsgpt2-112m-half": {"layers": 6, "heads": 6, "width": 768, "positions": 64, **GPT2, **DSGPT2},
        "dsgpt2-345m": {"layers": 24, "heads": 16, "width": 1024, "positions": 64, **GPT2, **DSGPT2},
        "megatron-345m": {"layers": 24, "heads": 16, "width": 1024, "positions": 1024, **GPT2, "dropout": 0.1},
        "megatron-8.3b": {"layers": 72, "heads": 24, "width": 3072, "positions": 1024, **GPT2, "dropout": 0.1},
        # ASC22's task on Inspur's Yuan.
        "yuan-4.7b": {"layers": 40, "heads": 24, "width": 3072, "positions": 2048, **GPT2, "dropout": 0.1},
    },
    "llama": {
        **{name: {**numbers, **LLAMA} for name, numbers in COMMON.items()},
        **{name: {**LLAMA, **numbers} for name, numbers in PUBLISHED.items()},
    },
    "bert": {
        "tiny": {"layers": 2, "heads": 2, "width": 128, **BERT},
        "mini": {"layers": 4, "heads": 4, "width": 256, **BERT},
        "small": {"layers": 4, "heads": 8, "width": 512, **BERT},
        "medium": {"layers": 8, "heads": 8, "width": 512, **BERT},
        "base": {"layers": 12, "heads": 12, "width": 768, **BERT},
        "large": {"layers": 24, "heads": 16, "width": 1024, **BERT},
        "megatron-345m": {"layers": 24, "heads": 16, "width": 1024, **BERT, "norm": "pre", "dropout": 0.1},
    },
}
