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
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

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

CONDITIONS = ("plain", "closed output", "full disk", "read-only", "SIGHUP")
SECONDS = 120.0
"""A command that takes longer than this is stopped with SIGTERM; training may, any other command must not."""
MEMORY = 12 << 30
TINY = {"layers": 1, "heads": 1, "width": 8, "positions": 16}
DONE, USER, STOPPED, PIPE = 0, 2, 75, 141


@dataclass
class Outcome:
    """How a command ended."""

    arguments: list[str]
    code: int
    """The exit code; negative: the signal that ended it."""
    errors: str
    """What it wrote to stderr."""
    hung: bool = False

    def defect(self, allowed: tuple[int, ...]) -> str | None:
        """What is wrong with it, if anything."""
        last = (self.errors.strip().splitlines() or [""])[-1]
        if "Traceback (most recent call last)" in self.errors:
            return "traceback"
        if self.hung:
            return "hang"
        if self.code not in allowed:
            return f"exit code {self.code}, wanted one of {allowed}"
        if self.code == USER and not (last.startswith("textmill: ") and len(last) > 30):
            return "exit code 2 without a useful message"
        if self.code == USER and "No space left on device" in last:
            return "a full disk with exit code 2"
        return None


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


def run(arguments: list[str], folder: Path, condition: str = "plain", dice: random.Random | None = None) -> Outcome:
    """Run a command line in a forked process, under a condition that the process itself can be given."""
    dice, errors = dice or random.Random(0), folder.with_name(folder.name + ".err")
    fault = f"full@disk:{dice.choice([1, 2, 3, 5, 8, 13, 21, 34])}" if condition == "full disk" else ""
    closed = dice.choice(["pipe", "closed"]) if condition == "closed output" else ""
    process = os.fork()
    if process == 0:
        _become_command(arguments, folder, errors, fault, closed)
    started, hung, signalled = time.monotonic(), False, condition != "SIGHUP"
    hang_up = started + dice.uniform(0.1, 2.0)
    while (status := os.waitpid(process, os.WNOHANG))[0] == 0:
        now = time.monotonic()
        if not signalled and now > hang_up:
            signalled = True
            os.kill(process, signal.SIGHUP)
        if now > started + 2 * SECONDS:
            os.kill(process, signal.SIGKILL)
            hung = True
        elif now > started + SECONDS:
            hung = hung or arguments[:1] not in (["train"], ["run"])
            os.kill(process, signal.SIGTERM)
            time.sleep(5)
        time.sleep(0.01)
    return Outcome(arguments, os.waitstatus_to_exitcode(status[1]), errors.read_text(errors="replace"), hung)


def _become_command(arguments: list[str], folder: Path, errors: Path, fault: str, closed: str) -> NoReturn:
    """Run the program `textmill` in this process."""
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        os.chdir(folder)
        os.environ.update(HOME=str(folder), HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(null, 1)
        sys.stdin = open(0, closefd=False)
        sys.stdout, sys.stderr = (open(number, "w", errors="backslashreplace", closefd=False) for number in (1, 2))
        if closed == "pipe":
            read_end, write_end = os.pipe()
            os.dup2(write_end, 1)
            os.close(read_end)
            os.close(write_end)
        elif closed:
            os.close(1)
            sys.stdout = None  # type: ignore[assignment]
        from textmill.cli import command
        from textmill.storage import faults

        faults.arm(fault)
        sys.argv = ["textmill", *arguments]
        command()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(1)


class ReadOnly:
    """A folder that cannot be written while the context lasts; root needs a mount for that."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mounted = folder, False

    def __enter__(self) -> ReadOnly:
        if os.geteuid():
            self.folder.chmod(0o555)
            return self
        made = subprocess.run(["mount", "--bind", self.folder, self.folder], capture_output=True).returncode == 0
        self.mounted = made
        subprocess.run(["mount", "-o", "remount,bind,ro", self.folder], capture_output=True)
        return self

    def __exit__(self, *_: object) -> None:
        if os.geteuid():
            self.folder.chmod(0o755)
        elif self.mounted:
            subprocess.run(["umount", "-l", self.folder], check=True)


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
        "folder": ".", "corpus": {"sources": ["text.txt"], "documents": "block"}, "tokenizer": {"vocab": 300},
        "runner": {"workers": 1}, "model": {"shape": TINY}, "engine": {"device": "cpu"},
        "train": {"steps": 2, "batch": 2, "warmup": 0, "evaluate_batches": 1},
    }  # fmt: skip
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
