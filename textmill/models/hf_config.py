"""What families check in a transformers config.json, with errors that name the setting, and the padded vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.storage.files import read_json

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
WHOLE_NUMBERS = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "hidden_size": "width",
    "intermediate_size": "inner",
    "max_position_embeddings": "positions",
    "vocab_size": "vocab",
}
"""The numbers of a net by transformers' names, as in BERT and Llama, and ours."""
VOCAB_MULTIPLE = 128
"""Rows of an embedding in memory are a multiple of this, which makes matmuls faster."""


def pad_vocab(vocab: int) -> int:
    """Rows of the embedding in memory for a vocabulary."""
    return -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def read_config_file(name: str) -> tuple[Any, str]:
    """The content of a config.json, or of the one in a folder, and its path."""
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    return read_json(path), str(path)


@dataclass(frozen=True)
class HfConfig:
    """A config.json of a model kind such as GPT-2; each check raises an error for what textmill cannot open."""

    hf: dict[str, Any]
    where: str
    kind: str

    def __post_init__(self) -> None:
        if not isinstance(self.hf, dict):
            raise TextmillError(f"{self.where}: found a {type(self.hf).__name__}; it is not a {self.kind} config.json")

    def check(
        self,
        fixed: Mapping[str, Any],
        whole_numbers: Mapping[str, int | None],
        fractions: Iterable[str],
        heads: str,
        width: str,
    ) -> None:
        """Settings that must have one value, whole numbers above 0 with their defaults, numbers from 0 to 1, and that
        the heads divide the width."""
        hf = self.hf
        where = self.where
        has = f"a {self.kind} config.json has"
        for key, wanted in fixed.items():
            if hf.get(key, wanted) != wanted:
                raise TextmillError(f"{where}: {key} is {hf[key]}; textmill's {self.kind} has {key}={wanted} only")
        for key, default in whole_numbers.items():
            if type(value := hf.get(key, default)) is not int or value < 1:
                raise TextmillError(f"{where}: {key} is {hf.get(key)!r}; {has} a whole number above 0 there")
        for key in fractions:
            if not isinstance(value := hf.get(key, 0.1), int | float) or not 0 <= value < 1:
                raise TextmillError(f"{where}: {key} is {value!r}; {has} a number from 0 to 1 there")
        if hf[width] % hf[heads]:
            raise TextmillError(
                f"{where}: {hf[heads]} heads do not divide the width {hf[width]}; fix {heads} or {width}"
            )

    def activation(self, key: str, default: str) -> str:
        """Our name of the activation."""
        name = self.hf.get(key, default)
        if not isinstance(name, str) or name not in SAME_ACTIVATION:
            raise TextmillError(f"{self.where}: {key} is {name!r}; textmill knows {', '.join(SAME_ACTIVATION)}")
        return SAME_ACTIVATION[name]

    def eos_id(self) -> int:
        """The end-of-text token, the first if there are several; default: the last of the vocabulary."""
        end = self.hf.get("eos_token_id")
        end = end[0] if isinstance(end, list) and end else end
        if end is not None and type(end) is not int:
            raise TextmillError(
                f"{self.where}: eos_token_id is {end!r}; a {self.kind} config.json has the number of a token there, "
                "or null"
            )
        return int(self.hf["vocab_size"]) - 1 if end is None else end
