"""Distillation on Shakespeare on a CPU: a student of half the teacher's depth, alone and with teachers, three seeds.

    python bench/distil.py [--steps 500] [--seeds 3] [--folder FOLDER]

Prints the valid loss of every student, the mean over seeds, and the difference to the student alone. Finished runs in
FOLDER are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

import textmill
from textmill.where import open_where

SHAPE = "model.shape.width=96", "model.shape.heads=3", "model.shape.positions=64"
TEACHER_LAYERS, LAYERS = 4, 2


def train(folder: Path, name: str, steps: int, seed: int, *settings: str) -> Path:
    """Train a run on the quickstart's tokens; return its folder."""
    run = folder / f"{name}-{seed}"
    if (run / "done").exists():
        return run
    lasting = ["train.save_every=100000", f"train.evaluate_every={steps}", "train.log_every=100"]
    own = [f"folder={folder}", f"train.folder={run}", f"train.seed={seed}", f"train.steps={steps}", *lasting]
    textmill.train(open_where("quickstart", [*own, *settings]).config)
    (run / "done").touch()
    return run


def valid_loss(run: Path) -> float:
    """The last valid loss of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float([line["valid_loss"] for line in lines if "valid_loss" in line][-1])


def students(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """All students of one seed, and the teacher."""
    small = [f"model.shape.layers={LAYERS}", *SHAPE]
    teachers = [
        train(folder, name, steps, seed, f"model.shape.layers={TEACHER_LAYERS}", *SHAPE, f"train.seed={number}")
        for name, number in (("teacher", seed), ("second teacher", seed + 100))
    ]
    blocks = [f"model.init_from={teachers[0]}", "model.init_layers=[1,3]"]
    first, both = (f"train.distil.teachers=[{','.join(map(str, found))}]" for found in (teachers[:1], teachers))
    alone = train(folder, "alone", steps, seed, *small)
    own = f"train.distil.teachers=[{alone}]"
    return {
        "teacher, 4 layers": teachers[0],
        "student alone, 2 layers": alone,
        "from the teacher's blocks": train(folder, "blocks", steps, seed, *blocks),
        "distilled": train(folder, "distilled", steps, seed, *small, first),
        "distilled, from the teacher's blocks": train(folder, "both", steps, seed, *blocks, first),
        "distilled from two teachers": train(folder, "two", steps, seed, *small, both),
        "distilled from the student alone": train(folder, "self", steps, seed, *small, own, f"train.seed={seed + 50}"),
    }


def main() -> None:
    """Train all students and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="distil-"))
    for command in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
        command(open_where("quickstart", [f"folder={folder}"]).config)
    losses: dict[str, list[float]] = {}
    for seed in range(1, arguments.seeds + 1):
        for name, run in students(folder, arguments.steps, seed).items():
            losses.setdefault(name, []).append(valid_loss(run))
    alone = mean(losses["student alone, 2 layers"])
    print(f"valid loss after {arguments.steps} steps, seeds 1 to {arguments.seeds}")
    for name, found in losses.items():
        values = "  ".join(f"{one:.4f}" for one in found)
        print(f"  {name:<38}{values}   mean {mean(found):.4f}  {mean(found) - alone:+.4f}")


if __name__ == "__main__":
    main()
