"""The generations of `train.generations`: the model is trained several times, each time taught by the one before
(self-distillation).

Each generation is an ordinary run, whose run.yaml has no generations but a teacher: the last one in the run folder, the
ones before in subfolders of it. So every other command finds the last one, and the loop knows of one run only.
"""

from __future__ import annotations

import gc
import math
import os
import time
from pathlib import Path

from textmill.checkpoints.folders import StepChoice, list_checkpoints
from textmill.config import RunConfig, TrainConfig
from textmill.engines.distillation import generations_cost
from textmill.errors import TextmillError
from textmill.processes.launch import read_launch
from textmill.storage.files import claim_folder, format_path
from textmill.storage.stages import Force
from textmill.training import loop
from textmill.training.run_folder import clean_run_folder


def train(
    config: RunConfig,
    force: Force = "no",
    step: StepChoice = "latest",
    *,
    change: bool = False,
    started: float | None = None,
    evaluates: bool = False,
) -> Path:
    """Train all generations that are not finished; `step` and `change` are for the one that is resumed. The arguments
    are those of `loop.train`, which trains one."""
    check_processes(config.train)
    started = time.perf_counter() if started is None else started
    generations = split_generations(config)
    count = len(generations)
    first = _first_unfinished(generations) if force == "no" else 1
    if first > 1 and config.train.minutes is not None:  # the generations that are finished took their shares
        left = math.prod(1 - _share_of_minutes(number, count) for number in range(1, first))
        started -= 60 * config.train.minutes * (1 - left)
    if force == "yes":  # else a command that is killed in the first one would leave later ones of another teacher
        for later in generations[1:]:
            _remove_run(later.folder_of("train"))
    for number in range(first, count + 1):
        generation = generations[number - 1]
        if count > 1:
            where = format_path(generation.folder_of("train"))
            print(f"train: generation {number} of {count}, in {where}", flush=True)
        # The time that is over by now is taken from all generations that are left, each its share.
        others_share = 1 - _share_of_minutes(number, count)
        start = started + others_share * (time.perf_counter() - started)
        last = number == count
        loop.train(generation, force, step, change=change, started=start, evaluates=evaluates and last)
        step, change = "latest", False
        if not last:
            gc.collect()  # the engine, which is part of a cycle, before the next one is opened
    return config.folder_of("train")


def check_processes(train: TrainConfig) -> None:
    """Refuse several processes: they cannot connect again for the next generation."""
    if train.generations > 1 and (launch := read_launch(os.environ)) and launch.world > 1:
        raise TextmillError(
            f"train.generations: found {launch.world} processes; start it without a launcher, or train each generation "
            "with a command of its own, with train.distil.teachers"
        )


def split_generations(config: RunConfig) -> list[RunConfig]:
    """The config of each generation: its folder, seed, teacher, and its share of the minutes that are then left."""
    count = config.train.generations
    if count == 1:
        return [config]
    folder = config.folder_of("train")
    generations: list[RunConfig] = []
    for number in range(1, count + 1):
        train = config.train.model_copy(update={"generations": 1, "seed": (config.train.seed + number - 1) % 2**63})
        if train.minutes is not None:  # of all minutes, so that a resumed run has the same
            train = train.model_copy(update={"minutes": _share_of_minutes(number, count) * train.minutes})
        if number < count:
            train = train.model_copy(update={"folder": str(folder / f"generation-{number}")})
        if generations:
            teachers = [str(generations[-1].folder_of("train"))]
            train = train.model_copy(update={"distil": train.distil.model_copy(update={"teachers": teachers})})
        generations.append(config.model_copy(update={"train": train}))
    return generations


def _share_of_minutes(number: int, count: int) -> float:
    """The share of a generation in the time that is left when it begins."""
    return 1 / generations_cost(count) if number == 1 else 1 / (count - number + 1)


def _remove_run(folder: Path) -> None:
    if list_checkpoints(folder):
        with claim_folder(folder, "train.folder", first=True):
            clean_run_folder(folder, 0)


def _first_unfinished(generations: list[RunConfig]) -> int:
    """The number of the last generation that has a checkpoint: those before it are finished; 1 if none has."""
    folders = [generation.folder_of("train") for generation in generations]
    begun = [bool(list_checkpoints(folder)) for folder in folders]
    if begun[-1] and not all(begun):
        raise TextmillError(
            f"train.generations: {folders[-1]} has checkpoints, but {folders[begun.index(False)]} has none; put it "
            "back if it was moved, set train.generations back if it was changed (1: none), choose another "
            "train.folder, or start from scratch with --force"
        )
    return max(1, sum(begun))
