"""CPU seconds of a step: `textmill train`, a `for` loop with the built-in loss, and one with a loss on full logits.

    python bench/own_loop.py [STEPS] [ROUNDS]

The three take turns, so that a busy machine slows all; the first steps do not count.
"""

from __future__ import annotations

import io
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout

import torch
import torch.nn.functional as F

import textmill
from textmill.training.loop import TrainingStep

SETTINGS = {
    "engine.device": "cpu",
    "engine.micro_batch": 8,
    "model.size": "nano",
    "train.preset": "none",
    "train.warmup": 0,
    "train.evaluate_every": 1_000_000,
    "train.save_every": 1_000_000,
    "train.evaluate_batches": 1,
}
NOT_COUNTED = 5


def compute(kind: str, step: TrainingStep) -> None:
    if kind == "command":
        step.run()
        return
    for batch in step:
        if kind == "built-in loss":
            step.backward(step.loss(batch))
            continue
        labels = batch.labels.flatten().long()
        losses = F.cross_entropy(step.logits(batch).flatten(0, 1), labels, ignore_index=-100, reduction="none")
        step.backward((losses * batch.weights.flatten()).sum())


def seconds_of_a_step(kind: str, folder: str, steps: int, number: int) -> float:
    settings = {**SETTINGS, "folder": folder, "train.folder": f"{folder}/run-{number}-{kind}", "train.steps": steps}
    times = []
    with redirect_stdout(io.StringIO()), textmill.open_training("quickstart", settings) as run:
        before = time.process_time()
        for step in run:
            compute(kind, step)
            times.append(time.process_time() - before)
            before = time.process_time()
    return statistics.mean(times[NOT_COUNTED:-1])  # the last step saves


def main(steps: int = 60, rounds: int = 5) -> None:
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {"command": [], "built-in loss": [], "loss on logits": []}
    with tempfile.TemporaryDirectory() as folder:
        for stage in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
            stage("quickstart", settings={"folder": folder})
        for number in range(rounds):
            for kind, found in seconds.items():
                found.append(seconds_of_a_step(kind, folder, steps, number))
    for kind, found in seconds.items():
        ratios = [one / other for one, other in zip(found, seconds["command"], strict=True)]
        print(
            f"{kind:<15} {1000 * statistics.median(found):7.2f} ms, least {1000 * min(found):7.2f} ms, "
            f"of the command's: median {statistics.median(ratios):.3f}, least / least "
            f"{min(found) / min(seconds['command']):.3f}"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
