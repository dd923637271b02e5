"""Distillation on Shakespeare on a CPU: a student of half the teacher's depth, alone and with teachers, three seeds.

    python bench/distil.py [--steps 500] [--seeds 3] [--folder FOLDER]

Prints the valid loss of every student, the mean over seeds, and the difference to the student alone. Another teacher
has twice the steps of its students. Finished runs in FOLDER are not run again.
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
ALONE = "student alone, 2 layers"


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


def small_settings(folder: Path, seed: int, teacher: str = "teacher") -> tuple[list[str], list[str], str]:
    """Settings of a student with random weights, of one from two of the teacher's blocks, and of its teacher."""
    run = folder / f"{teacher}-{seed}"
    blocks = [f"model.init_from={run}", "model.init_layers=[1,3]"]
    return [f"model.shape.layers={LAYERS}", *SHAPE], blocks, f"train.distil.teachers=[{run}]"


def with_one_teacher(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """A teacher with as many steps as its students."""
    small, blocks, distil = small_settings(folder, seed)
    return {
        "teacher, 4 layers": train(folder, "teacher", steps, seed, f"model.shape.layers={TEACHER_LAYERS}", *SHAPE),
        ALONE: train(folder, "alone", steps, seed, *small),
        "from the teacher's blocks": train(folder, "blocks", steps, seed, *blocks),
        "distilled": train(folder, "distilled", steps, seed, *small, distil),
        "distilled, from the teacher's blocks": train(folder, "both", steps, seed, *blocks, distil),
    }


def with_better_teacher(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """The same students of a teacher that was trained for twice the steps."""
    small, blocks, distil = small_settings(folder, seed, "long")
    deep = f"model.shape.layers={TEACHER_LAYERS}"
    return {
        "teacher, twice the steps": train(folder, "long", 2 * steps, seed, deep, *SHAPE),
        "from its blocks": train(folder, "blocks of long", steps, seed, *blocks),
        "distilled from it": train(folder, "distilled from long", steps, seed, *small, distil),
        "distilled from it, from its blocks": train(folder, "both from long", steps, seed, *blocks, distil),
    }


def with_other_teachers(folder: Path, steps: int, seed: int) -> dict[str, Path]:
    """Two teachers; the student itself as a teacher."""
    small, deep = small_settings(folder, seed)[0], f"model.shape.layers={TEACHER_LAYERS}"
    second = train(folder, "second teacher", steps, seed, deep, *SHAPE, f"train.seed={seed + 100}")
    both = f"train.distil.teachers=[{folder / f'teacher-{seed}'},{second}]"
    own = f"train.distil.teachers=[{folder / f'alone-{seed}'}]"
    return {
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
    for train_all in (with_one_teacher, with_better_teacher, with_other_teachers):
        for seed in range(1, arguments.seeds + 1):
            for name, run in train_all(folder, arguments.steps, seed).items():
                losses.setdefault(name, []).append(valid_loss(run))
    alone = mean(losses[ALONE])
    print(f"valid loss after {arguments.steps} steps, seeds 1 to {arguments.seeds}")
    for name, found in losses.items():
        values = "  ".join(f"{one:.4f}" for one in found)
        print(f"  {name:<38}{values}   mean {mean(found):.4f}  {mean(found) - alone:+.4f}")


if __name__ == "__main__":
    main()
