"""Kill a training run at random moments and resume it until it is done; compare it bitwise with an undisturbed run.

    python bench/kill_train.py [kills] [steps] [seed] [stops] [section.key=value ...]

Settings override those below; on a GPU: engine.device=cuda engine.deterministic=true engine.precision=bf16.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())"]
CLOCK = ("tokens_per_second", "slowest_rank", "slowest_rank_ratio")
"""Metrics that depend on the clock."""
SETTINGS = [
    "model.shape.heads=2",
    "model.shape.width=32",
    "model.shape.dropout=0.1",
    "train.length=32",
    "train.batch=8",
    "train.log_every=1",
    "train.save_every=5",
    "train.evaluate_every=10",
    "train.evaluate_batches=4",
    "train.warmup=5",
    "train.optimizer=adamw",
    "train.learning_rate=3e-3",
    "engine.device=cpu",
]


def textmill(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, **options)


def prepare_tokens(root: Path) -> None:
    """Write the corpus, tokenizer and tokens that the runs use."""
    for command in ("prepare", "tokenize"):
        done = textmill(command, "quickstart", f"folder={root}", "tokenizer.vocab=300")
        assert done.returncode == 0, done.stderr


def train_arguments(root: Path, run: Path, steps: int) -> list[str]:
    """Return the command-line arguments that train one run."""
    return [
        "train",
        "quickstart",
        f"folder={root}",
        "tokenizer.vocab=300",
        f"train.folder={run}",
        f"train.steps={steps}",
        *SETTINGS,
    ]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the logged metrics without those of CLOCK."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in lines]


def hash_checkpoint(run: Path, steps: int) -> str:
    """Return a hash of the last checkpoint's weights and moments."""
    folder = run / f"step-{steps:07d}"
    return hashlib.sha256(
        (folder / "model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()
    ).hexdigest()


def start_training(root: Path, run: Path, steps: int, fault: str = "") -> subprocess.Popen[str]:
    """Start or resume a run."""
    environment = {**os.environ, "TEXTMILL_FAULT": fault}
    command = [*COMMAND, *train_arguments(root, run, steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_metrics(process: subprocess.Popen[str], metrics: Path, size: int) -> None:
    """Wait until a run has written its first line of metrics."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        now = metrics.stat().st_size if metrics.exists() else -1
        if now not in (size, -1):
            return
        time.sleep(0.005)


def train_until_signal(root: Path, run: Path, steps: int, number: signal.Signals, wait: float) -> tuple[int, float]:
    """Train, and send a signal `wait` seconds after the first metrics; return exit code and seconds until the exit."""
    metrics = run / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else -1
    process = start_training(root, run, steps)
    wait_for_metrics(process, metrics, size)
    time.sleep(wait)
    started = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=300)
    return process.returncode, time.monotonic() - started


def train_with_kills(root: Path, run: Path, steps: int, kills: int, seed: int) -> int:
    """Train with SIGKILLs, by turns at a random moment and at a disk access; return how many hit the run."""
    dice, hits = random.Random(seed), 0
    for number in range(kills):
        if number % 2:
            process = start_training(root, run, steps, f"kill@disk:{dice.randrange(1, 80)}")
            process.communicate(timeout=300)
            hits += process.returncode == -signal.SIGKILL
        else:
            hits += train_until_signal(root, run, steps, signal.SIGKILL, dice.uniform(0, 0.35))[0] == -signal.SIGKILL
        if (run / f"step-{steps:07d}").exists():
            break  # the run finished before the next kill
    done = textmill(*train_arguments(root, run, steps))
    assert done.returncode == 0, done.stderr
    return hits


def train_with_stops(root: Path, run: Path, steps: int, stops: int, seed: int) -> list[float]:
    """Train with SIGTERMs at random moments; return the seconds to the exit for those that saved and exited with 75."""
    dice, seconds = random.Random(seed), []
    for _ in range(stops):
        code, spent = train_until_signal(root, run, steps, signal.SIGTERM, dice.uniform(0, 0.35))
        if code == 75:
            step = json.loads((run / "stopped.json").read_text())["step"]
            assert (run / f"step-{step:07d}" / "manifest.json").is_file()
            assert read_metrics(run)[-1]["step"] == step, "a logged step was not saved"
            seconds.append(spent)
    done = textmill(*train_arguments(root, run, steps))
    assert done.returncode == 0, done.stderr
    return seconds


def main(kills: int = 20, steps: int = 60, seed: int = 1, stops: int = 5) -> int:
    """Run the campaign; its results go to docs/faults.md."""
    with tempfile.TemporaryDirectory() as folder:
        root, undisturbed, killed, stopped = (Path(folder) / name for name in ("", "undisturbed", "killed", "stopped"))
        prepare_tokens(root)
        done = textmill(*train_arguments(root, undisturbed, steps))
        assert done.returncode == 0, done.stderr
        hits, lines = train_with_kills(root, killed, steps, kills, seed), read_metrics(undisturbed)
        seconds = train_with_stops(root, stopped, steps, stops, seed)
        all_equal = True
        for name, run in ((f"{hits} SIGKILLs", killed), (f"{len(seconds)} SIGTERMs", stopped)):
            same = sum(one == other for one, other in zip(lines, read_metrics(run), strict=True))
            weights = hash_checkpoint(undisturbed, steps) == hash_checkpoint(run, steps)
            print(
                f"{name} in {steps} steps: {same} of {len(lines)} logged lines bitwise equal; "
                f"weights and moments equal: {weights}"
            )
            all_equal = all_equal and same == len(lines) and weights
        median, longest = statistics.median(seconds), max(seconds)
        print(f"from SIGTERM to the exit, saved: median {median:.2f} s, at most {longest:.2f} s")
        return 0 if all_equal and hits == kills and len(seconds) == stops else 1


if __name__ == "__main__":
    SETTINGS += [argument for argument in sys.argv[1:] if "=" in argument]
    sys.exit(main(*(int(argument) for argument in sys.argv[1:] if "=" not in argument)))
