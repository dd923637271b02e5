"""Train the same steps on real text in several precisions and compare their losses.

    python bench/precisions.py CORPUS.jsonl.xz BPE_FOLDER [size=medium] [batch=32] [steps=300] [precisions=bf16,fp8]
                               [optimizer=adamw] ...

Corpus, splits and validation are those of bench/time_to_loss.py; weights, batches, learning rates and seeds are equal.
Prints the mean training loss of the last 20 steps, the validation loss after the last step, the rate, and the
differences from the first precision.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.time_to_loss import SETTINGS, batch_at, evaluate, open_initial_engine, read_tokens, shuffle_windows
from textmill.training.run_length import lr_at

DEFAULTS: dict[str, Any] = {
    "size": "medium",
    "batch": 32,
    "steps": 300,
    "optimizer": "adamw",
    "learning_rate": 6e-4,
    "precisions": "bf16,fp8",
}
LAST = 20


def train_and_evaluate(settings: dict[str, Any], train: Any, valid: Any) -> tuple[float, float, float]:
    """Return the mean loss of the last steps, the validation loss, and the tokens/s of the second half."""
    starts, steps, size = shuffle_windows(settings, train), settings["steps"], settings["batch"]
    engine, config = open_initial_engine(settings)
    config = config.model_copy(update={"steps": steps})
    results: list[Any] = []
    for step in range(steps):
        if step == steps // 2:
            if results:
                float(results[-1].loss)  # waits for the device
            started = time.perf_counter()
        results.append(
            engine.train_step(batch_at(train, starts, step * size, settings, size), step, lr_at(step, config))
        )
    last = float(np.mean([result.loss for result in results[-LAST:]]))
    rate = (steps - steps // 2) * settings["batch"] * settings["length"] / (time.perf_counter() - started)
    found = evaluate(engine, valid, settings)
    engine.close()
    return last, found, rate


def main(arguments: list[str]) -> None:
    """Train in each precision and compare."""
    settings = {**SETTINGS, **DEFAULTS}
    for argument in arguments[2:]:
        key, _, value = argument.partition("=")
        settings[key] = type(settings[key])(value)
    train, valid = read_tokens(Path(arguments[0]), Path(arguments[1]))
    first: tuple[float, float, float] | None = None
    for precision in settings["precisions"].split(","):
        last, found, rate = train_and_evaluate({**settings, "precision": precision}, train, valid)
        line = f"{settings['size']} {precision}, {settings['steps']} steps: "
        line += f"training {last:.4f}, validation {found:.4f}, {rate:,.0f} tokens/s"
        if first:
            line += f" | difference from the first: training {last - first[0]:+.4f}, "
            line += f"validation {found - first[1]:+.4f}, rate x{rate / first[2]:.3f}"
        print(line, flush=True)
        first = first or (last, found, rate)
        gc.collect()
        torch._dynamo.reset()


if __name__ == "__main__":
    main(sys.argv[1:])
