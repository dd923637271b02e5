"""Small model folders as transformers has them, for conversions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.weights import noisy_weights
from textmill.config import ModelConfig, ShapeConfig, TokenizerConfig
from textmill.models import open_family
from textmill.storage.tensor_files import encode_safetensors
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, fit

TEXT = [
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 천천히 돌기 시작한다.",
    "할머니는 방앗간에서 쌀을 찧고, 아이들은 개울에서 물장구를 친다.",
    "겨울이 오면 강물이 얼어서 물레방아도 봄까지 쉬어야 한다.",
]


def korean_tokenizer(**settings: Any) -> TextTokenizer:
    return fit(iter([TEXT * 3]), TokenizerConfig(**{"vocab": 320, **settings}))


def write_folder(folder: Path, tokenizer: TextTokenizer, *, loud: float = 1.0, rows: int = 0, **numbers: Any) -> Path:
    """A folder with random weights; `loud` multiplies matrices, `rows` adds embeddings without a token."""
    family = open_family("gpt2")
    sizes = ShapeConfig(**{"layers": 2, "heads": 2, "width": 32, "positions": 96, **numbers})
    shape = family.shape_of(
        ModelConfig(size="nano", shape=sizes), vocab=tokenizer.vocab + rows, eos_id=tokenizer.eos_id
    )
    weights = [(name, values * np.float32(loud if values.ndim == 2 else 1)) for name, values in noisy_weights(shape)]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(family.hf_config_of(shape)))
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(weights)))
    tokenizer.save(folder)
    return folder
