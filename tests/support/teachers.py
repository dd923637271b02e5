"""Small teachers, and the config of a student, for the tests of distillation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.engine_runs import LENGTH, VOCAB, config_of
from tests.support.weights import noisy_weights
from textmill.config import DistilConfig, ModelConfig, RunConfig, ShapeConfig
from textmill.models import open_family
from textmill.storage.tensor_files import encode_safetensors


def write_teacher(folder: Path, layers: int = 3, width: int = 32, vocab: int = VOCAB) -> str:
    family = open_family("gpt2")
    sizes = ShapeConfig(layers=layers, heads=2, width=width, positions=LENGTH + 8)
    shape = family.shape_of(ModelConfig(size="nano", shape=sizes), vocab=vocab, eos_id=0)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(family.hf_config_of(shape)))
    (folder / "model.safetensors").write_bytes(b"".join(encode_safetensors(noisy_weights(shape))))
    return str(folder)


def distilling(kind: str, teachers: list[str], **settings: Any) -> RunConfig:
    return config_of(kind, micro_batch=2, distil=DistilConfig(teachers=teachers, **settings))
