"""Checkpoints with random weights, as training writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from textmill.checkpoints.folders import Checkpoint, open_checkpoint
from textmill.checkpoints.writing import Snapshot, plan_files, write_checkpoint
from textmill.models import Shape, initial_weights, open_family
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

TEXT = [
    "The mill stands by the river and the wheel begins to turn every morning.",
    "물레방아는 강가에 서 있다. 아침마다 바퀴가 천천히 돌기 시작한다.",
    "Değirmen köprünün üstünde duruyor; çark yavaş yavaş döner.",
]


def single_process_snapshot(
    step: int, weights: Iterable[Named], state: Iterable[Named], progress: dict[str, Any], files: dict[str, bytes]
) -> Snapshot:
    """A snapshot of a process that has all tensors."""
    weight_plan, weights = plan_files("model", weights)
    state_plan, state = plan_files("optimizer", state)
    return Snapshot(step, weights, state, progress, files, (weight_plan, state_plan))


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
    return open_checkpoint(write_checkpoint(run, single_process_snapshot(step, weights, [], {"step": step}, files)))
