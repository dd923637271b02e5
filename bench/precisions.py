"""The same steps on real text in several precisions, and how far their losses are apart.

    python bench/precisions.py CORPUS.jsonl.xz BPE_FOLDER [size=medium] [batch=32] [steps=300] [precisions=bf16,fp8] [optimizer=adamw] ...

Corpus, split and validation are those of bench/time_to_loss.py; weights, batches, rates and seeds are equal. Printed are the mean training
loss of the last 20 steps, the validation loss after the last, the rate, and what each differs from the first precision named.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.time_to_loss import SETTINGS, batch_at, fresh, loss_of, order_of, tokens_of
from textmill.schedules import lr_at

OWN: dict[str, Any] = {
    "size": "medium",
    "batch": 32,
    "steps": 300,
    "optimizer": "adamw",
    "rate": 6e-4,
    "precisions": "bf16,fp8",
}
LAST = 20


def trained(settings: dict[str, Any], train: Any, valid: Any) -> tuple[float, float, float]:
    """Mean loss of the last steps, validation loss, and tokens a second of the second half."""
    order, steps = order_of(settings, train), settings["steps"]
    engine, config = fresh(settings)
    config = config.model_copy(update={"steps": steps})
    results: list[Any] = []
    for step in range(steps):
        if step == steps // 2:
            begun = time.perf_counter() if not results else (float(results[-1].loss), time.perf_counter())[1]
        results.append(engine.train_step(batch_at(train, order, step, settings), step, lr_at(step, config)))
    last = float(np.mean([result.loss for result in results[-LAST:]]))
    rate = (steps - steps // 2) * settings["batch"] * settings["length"] / (time.perf_counter() - begun)
    found = loss_of(engine, valid, settings)
    engine.close()
    return last, found, rate


def main(words: list[str]) -> None:
    """Train in each precision and compare."""
    settings = {**SETTINGS, **OWN}
    for word in words[2:]:
        key, _, value = word.partition("=")
        settings[key] = type(settings[key])(value)
    train, valid = tokens_of(Path(words[0]), Path(words[1]))
    first: tuple[float, float, float] | None = None
    for precision in settings["precisions"].split(","):
        last, found, rate = trained({**settings, "precision": precision}, train, valid)
        line = f"{settings['size']} {precision}, {settings['steps']} steps: training {last:.4f}, validation {found:.4f}, {rate:,.0f} tokens/s"
        if first:
            line += f" | apart from the first: training {last - first[0]:+.4f}, validation {found - first[1]:+.4f}, rate x{rate / first[2]:.3f}"
        print(line, flush=True)
        first = first or (last, found, rate)
        gc.collect()
        torch._dynamo.reset()


if __name__ == "__main__":
    main(sys.argv[1:])
