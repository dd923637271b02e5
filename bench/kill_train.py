"""Kill a training run at seeded moments and start it again, until it is done; compare it bit by bit with one that was left alone.

python bench/kill_train.py [kills] [steps] [seed] [stops] [section.key=value ...]

Settings come after those below: on a GPU, engine.device=cuda engine.deterministic=true engine.precision=bf16.
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
SETTINGS = [
    "model.shape.heads=2", "model.shape.width=32", "model.shape.dropout=0.1", "train.length=32", "train.batch=8",
    "train.log_every=1", "train.save_every=5", "train.evaluate_every=10", "train.evaluate_batches=4", "train.warmup=5",
    "train.optimizer=adamw", "train.learning_rate=3e-3", "engine.device=cpu",
]  # fmt: skip


def textmill(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One call of the command, to its end."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=300, **options)


def prepared(root: Path) -> None:
    """Corpus, tokenizer and tokens for the runs to come."""
    for command in ("prepare", "tokenize"):
        done = textmill(command, "quickstart", f"folder={root}", "tokenizer.vocab=300")
        assert done.returncode == 0, done.stderr


def trained(root: Path, run: Path, steps: int) -> list[str]:
    """The words that train one run."""
    return [
        "train",
        "quickstart",
        f"folder={root}",
        "tokenizer.vocab=300",
        f"train.folder={run}",
        f"train.steps={steps}",
        *SETTINGS,
    ]


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what a clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def last_weights(run: Path, steps: int) -> str:
    """A hash of the last checkpoint's weights and moments."""
    folder = run / f"step-{steps:07d}"
    return hashlib.sha256(
        (folder / "model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()
    ).hexdigest()


def sitting(root: Path, run: Path, steps: int, fault: str = "") -> subprocess.Popen[str]:
    """One sitting of a run, begun."""
    environment = {**os.environ, "TEXTMILL_FAULT": fault}
    command = [*COMMAND, *trained(root, run, steps)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def wait_for_metrics(process: subprocess.Popen[str], metrics: Path, size: int) -> None:
    """Until a sitting has written its first line."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        now = metrics.stat().st_size if metrics.exists() else -1
        if now not in (size, -1):
            return
        time.sleep(0.005)


def disturbed(root: Path, run: Path, steps: int, number: signal.Signals, wait: float) -> tuple[int, float]:
    """One sitting that hears a signal so many seconds after its first metrics; its exit code, and the seconds until it was over."""
    metrics = run / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else -1
    process = sitting(root, run, steps)
    wait_for_metrics(process, metrics, size)
    time.sleep(wait)
    began = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=300)
    return process.returncode, time.monotonic() - began


def killed_until_done(root: Path, run: Path, steps: int, kills: int, seed: int) -> int:
    """Train with so many SIGKILLs, by turns at a moment drawn after first metrics and at a touch of the disk; how many hit."""
    dice, hits = random.Random(seed), 0
    for number in range(kills):
        if number % 2:
            process = sitting(root, run, steps, f"kill@disk:{dice.randrange(1, 80)}")
            process.communicate(timeout=300)
            hits += process.returncode == -signal.SIGKILL
        else:
            hits += disturbed(root, run, steps, signal.SIGKILL, dice.uniform(0, 0.35))[0] == -signal.SIGKILL
        if (run / f"step-{steps:07d}").exists():
            break  # it came through before the next blow
    done = textmill(*trained(root, run, steps))
    assert done.returncode == 0, done.stderr
    return hits


def stopped_until_done(root: Path, run: Path, steps: int, stops: int, seed: int) -> list[float]:
    """Train with so many SIGTERMs at seeded moments; the seconds from each to the end, of those that ended with 75 and saved."""
    dice, seconds = random.Random(seed), []
    for _ in range(stops):
        code, took = disturbed(root, run, steps, signal.SIGTERM, dice.uniform(0, 0.35))
        if code == 75:
            step = json.loads((run / "stopped.json").read_text())["step"]
            assert (run / f"step-{step:07d}" / "manifest.json").is_file()
            assert numbers_of(run)[-1]["step"] == step, "nothing was done and not saved"
            seconds.append(took)
    done = textmill(*trained(root, run, steps))
    assert done.returncode == 0, done.stderr
    return seconds


def main(kills: int = 20, steps: int = 60, seed: int = 1, stops: int = 5) -> int:
    """The campaign; its figures go to docs/faults.md."""
    with tempfile.TemporaryDirectory() as folder:
        root, alone, killed, stopped = (Path(folder) / name for name in ("", "alone", "killed", "stopped"))
        prepared(root)
        done = textmill(*trained(root, alone, steps))
        assert done.returncode == 0, done.stderr
        hits, lines = killed_until_done(root, killed, steps, kills, seed), numbers_of(alone)
        seconds = stopped_until_done(root, stopped, steps, stops, seed)
        right = True
        for name, run in ((f"{hits} SIGKILLs", killed), (f"{len(seconds)} SIGTERMs", stopped)):
            same = sum(one == other for one, other in zip(lines, numbers_of(run), strict=True))
            weights = last_weights(alone, steps) == last_weights(run, steps)
            print(
                f"{name} in {steps} steps: {same} of {len(lines)} logged lines bitwise equal; weights and moments equal: {weights}"
            )
            right = right and same == len(lines) and weights
        middle, longest = statistics.median(seconds), max(seconds)
        print(f"from SIGTERM to the end, saved: {middle:.2f} s in the middle, {longest:.2f} s at most")
        return 0 if right and hits == kills and len(seconds) == stops else 1


if __name__ == "__main__":
    SETTINGS += [word for word in sys.argv[1:] if "=" in word]
    sys.exit(main(*(int(word) for word in sys.argv[1:] if "=" not in word)))
