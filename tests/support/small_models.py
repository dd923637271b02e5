"""Checkpoints with random weights, as training writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from textmill.checkpoints.folders import Checkpoint, open_checkpoint
from textmill.checkpoints.writing import Snapshot, write_checkpoint
from textmill.models import Shape, initial_weights, open_family
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

TEXT = [
    "The mill stands by the river and the wheel begins to turn every morning.",
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 천천히 돌기 시작한다.",
    "Değirmen köprünün üstünde duruyor; çark yavaş yavaş döner.",
]


def write_model(run: Path, tokenizer: TextTokenizer, shape: Shape, step: int = 7) -> Checkpoint:
    """Write a checkpoint with large random weights, so that the likeliest token differs between positions."""
    dice = np.random.default_rng(7)
    weights = [
        (
            name,
            values * np.float32(8 if "wte" in name or "embed_tokens" in name else 20)
            if values.ndim == 2
            else values + dice.random(len(values), np.float32),
        )
        for name, values in initial_weights(shape, 7)
    ]
    texts = {
        "config.json": json.dumps(open_family(shape.family).hf_config_of(shape)),
        **tokenizer.files(shape.positions),
    }
    files = {name: text.encode() for name, text in texts.items()}
    return open_checkpoint(write_checkpoint(run, Snapshot(step, weights, [], {"step": step}, files)))
