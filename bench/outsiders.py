"""Use textmill as a careless stranger would, thousands of times: no traceback, no hang, a message for every mistake.

    python bench/outsiders.py [configs] [files] [lines] [seed]

1. Random valid configs: train, stop it in the middle, resume, generate.
2. Mutated input files of every kind: prepare.
3. Mutated command lines of every command but `serve`.

A fifth of all cases each: as it is; standard output closed; the disk full; the folder read-only; SIGHUP in the middle.
Each command runs in a process forked from this one, where all modules are loaded already.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))
from outsider_cases import (
    COMMAND_LINES,
    PREPARE_SETTINGS,
    SENTENCES,
    input_files,
    mutate_bytes,
    mutate_line,
    random_config,
)
from outsider_commands import DONE, PIPE, STOPPED, USER, Outcome, ReadOnly, run

CONDITIONS = ("plain", "closed output", "full disk", "read-only", "SIGHUP")
TINY = {"layers": 1, "heads": 1, "width": 8, "positions": 16}


@dataclass
class Campaign:
    """The folder of all cases, and what was found."""

    root: Path
    counts: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)

    def judge(self, part: str, condition: str, outcome: Outcome, allowed: tuple[int, ...]) -> bool:
        """Count an outcome; print and keep a defect."""
        self.counts[f"{part}: commands"] += 1
        self.counts[f"{part}: exit code {outcome.code}"] += 1
        if (found := outcome.defect(allowed)) is None:
            return True
        self.report(part, condition, f"{found}: {outcome.arguments}\n{outcome.errors[-3000:]}")
        return False

    def report(self, part: str, condition: str, text: str) -> None:
        """Print and keep a defect."""
        self.defects.append(f"{part}, {condition}: {text}")
        print(f"DEFECT {self.defects[-1]}", flush=True)


def judge_command(
    campaign: Campaign, part: str, condition: str, arguments: list[str], folder: Path, dice: random.Random
) -> Outcome:
    """Run a command under a condition and judge it by what must hold for every command."""
    if condition == "read-only":
        with ReadOnly(folder):
            outcome = run(arguments, folder)
    else:
        outcome = run(arguments, folder, condition, dice)
    also = {"closed output": (PIPE,), "full disk": (STOPPED,), "SIGHUP": (STOPPED,)}.get(condition, ())
    slow = (STOPPED,) if arguments[:1] in (["train"], ["run"]) else ()
    campaign.judge(part, condition, outcome, (DONE, USER, *also, *slow))
    return outcome


def new_folder(campaign: Campaign) -> Path:
    """Return a copy of the template, where it was made: its folders record their place."""
    folder = campaign.root / "work"
    shutil.copytree(campaign.root / "template", folder, symlinks=True)
    return folder


def make_template(campaign: Campaign) -> None:
    """Write a small config, a corpus, a tokenizer, tokens and a run with textmill itself."""
    folder = campaign.root / "work"
    folder.mkdir()
    (folder / "text.txt").write_text("\n\n".join(SENTENCES), encoding="utf-8")
    write_config(folder, {})
    for command in ("prepare", "tokenize", "train"):
        outcome = run([command, "small.yaml"], folder)
        assert outcome.code == 0, outcome.errors
    folder.rename(campaign.root / "template")


def write_config(folder: Path, settings: dict[str, Any]) -> None:
    """Write small.yaml."""
    tree: dict[str, Any] = {
        "folder": ".",
        "corpus": {"sources": ["text.txt"], "documents": "block"},
        "tokenizer": {"vocab": 300},
        "runner": {"workers": 1},
        "model": {"shape": TINY},
        "engine": {"device": "cpu"},
        "train": {"steps": 2, "batch": 2, "warmup": 0, "evaluate_batches": 1},
    }
    (folder / "small.yaml").write_text(yaml.safe_dump(tree | settings, allow_unicode=True), encoding="utf-8")


def try_config(campaign: Campaign, condition: str, dice: random.Random) -> None:
    """Train a random config with an interruption, resume it, generate."""
    part, folder = "config", new_folder(campaign)
    shutil.rmtree(folder / "run")
    write_config(folder, random_config(dice))
    train = ["train", "small.yaml"]
    outcome = judge_command(campaign, part, condition, train, folder, dice)
    if condition == "plain":  # the next one resumes what was killed here
        run([*train, "train.steps=9"], folder, "SIGHUP", dice)
        train.append("train.steps=9")
    elif condition == "closed output" and outcome.code == DONE and not list((folder / "run").glob("step-*")):
        campaign.report(part, condition, f"exit code 0 without a checkpoint: {folder}")
    again = run(train, folder)
    campaign.judge(part, condition, again, (DONE,))
    if again.code == DONE:
        campaign.judge(part, condition, run(["generate", "run", "sample.prompt=The mill"], folder), (DONE,))
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [json.loads(line)["step"] for line in lines if '"loss"' in line]
        if len(steps) != len(set(steps)):
            campaign.report(part, condition, f"a step is logged twice: {folder}: {steps}")
    shutil.rmtree(folder)


def try_file(campaign: Campaign, number: int, condition: str, dice: random.Random, files: dict[str, bytes]) -> None:
    """Prepare a mutated file."""
    folder = campaign.root / "work"
    folder.mkdir()
    name = sorted(files)[number % len(files)]
    other = dice.choice(sorted(files)) if dice.random() < 0.1 else name
    (folder / name).write_bytes(mutate_bytes(files[other], dice))
    settings = dice.sample(PREPARE_SETTINGS, dice.randint(0, 2))
    write_config(folder, {"corpus": {"sources": [name]}})
    arguments = ["prepare", "small.yaml", *settings]
    outcome = judge_command(campaign, "file", condition, arguments, folder, dice)
    again = run(arguments, folder)
    campaign.judge("file", f"{condition}, again", again, (DONE, USER))
    if (outcome.code == DONE or again.code == DONE) and not (folder / "corpus" / "manifest.json").is_file():
        campaign.report("file", condition, f"exit code 0 without a corpus: {arguments}")
    if outcome.code in (DONE, USER) and condition == "plain" and again.code != outcome.code:
        campaign.report("file", condition, f"exit code {outcome.code}, then {again.code}: {arguments}")
    shutil.rmtree(folder)


def try_line(campaign: Campaign, number: int, condition: str, dice: random.Random) -> None:
    """Run a mutated command line."""
    folder = new_folder(campaign)
    line = mutate_line(COMMAND_LINES[number % len(COMMAND_LINES)], dice)
    judge_command(campaign, "line", condition, line, folder, dice)
    shutil.rmtree(folder)


def preload() -> None:
    """Import what the commands import, so that forked processes start at once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from importlib import import_module

    from textmill.commands.table import COMMANDS

    for name, row in COMMANDS.items():
        if name != "serve":
            row.load()
    for name in ("engines.on_torch", "models.gpt2.net_torch", "runners.on_local"):
        import_module(f"textmill.{name}")


def run_cases(campaign: Campaign, counts: dict[str, int], seed: int) -> None:
    """Run all cases."""
    started = time.monotonic()
    make_template(campaign)
    intact = input_files()
    for part, count in counts.items():
        for number in range(count):
            dice = random.Random(f"{seed} {part} {number}")
            condition = CONDITIONS[(number + number // len(CONDITIONS)) % len(CONDITIONS)]
            if part == "config":
                try_config(campaign, condition, dice)
            elif part == "file":
                try_file(campaign, number, condition, dice, intact)
            else:
                try_line(campaign, number, condition, dice)
            if number % 50 == 49:
                print(f"{part}: {number + 1} of {count} cases", flush=True)
        seconds = time.monotonic() - started
        print(f"{part}: {count} cases, {seconds:.0f} s, {len(campaign.defects)} defects", flush=True)


def main(configs: int, files: int, lines: int, seed: int) -> int:
    """Run all cases; returns 1 if there is a defect."""
    preload()
    # Not TemporaryDirectory: a forked command runs exit handlers, and its handler would remove the folder.
    campaign = Campaign(Path(tempfile.mkdtemp()))
    try:
        run_cases(campaign, {"config": configs, "file": files, "line": lines}, seed)
    finally:
        shutil.rmtree(campaign.root, ignore_errors=True)
    for name, number in sorted(campaign.counts.items()):
        print(f"{name:<24} {number:>6,}")
    print(f"{len(campaign.defects)} defects", flush=True)
    return 1 if campaign.defects else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        given = [int(argument) for argument in sys.argv[1:]]
        sys.exit(main(*given, *(500, 300, 300, 1)[len(given) :]))
