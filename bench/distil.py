"""Distillation on Shakespeare on a CPU: a student of half the teacher's depth, alone and with teachers, three seeds.

    python bench/distil.py [--steps 500] [--teacher-steps 500] [--others] [--seeds 3] [--folder FOLDER]

Prints the valid loss of every student, the mean over seeds, and the difference to the student alone. --others: also
with two teachers, and with the student itself as teacher. Finished runs in FOLDER are not run again.
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
DEEP, SMALL = "model.shape.layers=4", "model.shape.layers=2"
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


def with_one_teacher(folder: Path, steps: int, teacher_steps: int, seed: int) -> dict[str, Path]:
    """A student alone, from the teacher's blocks, and distilled."""
    teacher = train(folder, "teacher", teacher_steps, seed, DEEP, *SHAPE)
    blocks, distil = (f"model.init_from={teacher}", "model.init_layers=[1,3]"), f"train.distil.teachers=[{teacher}]"
    return {
        "teacher, 4 layers": teacher,
        ALONE: train(folder, "alone", steps, seed, SMALL, *SHAPE),
        "from the teacher's blocks": train(folder, "blocks", steps, seed, *blocks),
        "distilled": train(folder, "distilled", steps, seed, SMALL, *SHAPE, distil),
        "distilled, from the teacher's blocks": train(folder, "both", steps, seed, *blocks, distil),
    }


def with_other_teachers(folder: Path, steps: int, teacher_steps: int, seed: int) -> dict[str, Path]:
    """Two teachers; the student itself as a teacher."""
    second = train(folder, "second teacher", teacher_steps, seed, DEEP, *SHAPE, f"train.seed={seed + 100}")
    both = f"train.distil.teachers=[{folder / f'teacher-{seed}'},{second}]"
    own = f"train.distil.teachers=[{folder / f'alone-{seed}'}]", f"train.seed={seed + 50}"
    return {
        "distilled from two teachers": train(folder, "two", steps, seed, SMALL, *SHAPE, both),
        "distilled from the student alone": train(folder, "self", steps, seed, SMALL, *SHAPE, *own),
    }


def main() -> None:
    """Train all students and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--teacher-steps", type=int, default=0)
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="distil-"))
    for command in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
        command(open_where("quickstart", [f"folder={folder}"]).config)
    losses: dict[str, list[float]] = {}
    teacher_steps = arguments.teacher_steps or arguments.steps
    for train_all in (with_one_teacher, with_other_teachers)[: 2 if arguments.others else 1]:
        for seed in range(1, arguments.seeds + 1):
            for name, run in train_all(folder, arguments.steps, teacher_steps, seed).items():
                losses.setdefault(name, []).append(valid_loss(run))
    alone = mean(losses[ALONE])
    print(f"valid loss after {arguments.steps} steps, seeds 1 to {arguments.seeds}")
    for name, found in losses.items():
        values = "  ".join(f"{one:.4f}" for one in found)
        print(f"  {name:<38}{values}   mean {mean(found):.4f}  {mean(found) - alone:+.4f}")


if __name__ == "__main__":
    main()
