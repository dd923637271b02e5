"""Named model sizes, as plain numbers."""

from __future__ import annotations

from typing import Any

GPT2 = {"activation": "gelu_new", "dropout": 0.0, "untied": False}
BERT = {"positions": 512, "activation": "gelu", "norm": "post", "pair_head": True, "deep_init": False, "dropout": 0.0}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "nano": {"layers": 2, "heads": 3, "width": 96, "positions": 256, **GPT2},
        "micro": {"layers": 4, "heads": 4, "width": 256, "positions": 512, **GPT2},
        "mini": {"layers": 8, "heads": 8, "width": 512, "positions": 1024, **GPT2},
        "small": {"layers": 12, "heads": 12, "width": 768, "positions": 1024, **GPT2},
        "medium": {"layers": 24, "heads": 16, "width": 1024, "positions": 1024, **GPT2},
        "large": {"layers": 36, "heads": 20, "width": 1280, "positions": 1024, **GPT2},
        "xl": {"layers": 48, "heads": 25, "width": 1600, "positions": 1024, **GPT2},
        # dsGPT2: erf GELU, short contexts, dropout as its configs leave it.
        "dsgpt2-112m": {
            "layers": 12,
            "heads": 12,
            "width": 768,
            "positions": 128,
            "activation": "gelu",
            "dropout": 0.0,
            "untied": False,
        },
        "dsgpt2-112m-half": {
            "layers": 6,
            "heads": 6,
            "width": 768,
            "positions": 64,
            "activation": "gelu",
            "dropout": 0.1,
            "untied": False,
        },
        "dsgpt2-345m": {
            "layers": 24,
            "heads": 16,
            "width": 1024,
            "positions": 64,
            "activation": "gelu",
            "dropout": 0.1,
            "untied": False,
        },
        "megatron-345m": {
            "layers": 24,
            "heads": 16,
            "width": 1024,
            "positions": 1024,
            "activation": "gelu_new",
            "dropout": 0.1,
            "untied": False,
        },
        "megatron-8.3b": {
            "layers": 72,
            "heads": 24,
            "width": 3072,
            "positions": 1024,
            "activation": "gelu_new",
            "dropout": 0.1,
            "untied": False,
        },
        # ASC22's task on Inspur's Yuan.
        "yuan-4.7b": {
            "layers": 40,
            "heads": 24,
            "width": 3072,
            "positions": 2048,
            "activation": "gelu_new",
            "dropout": 0.1,
            "untied": False,
        },
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
