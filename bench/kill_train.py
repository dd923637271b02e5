"""Kill a training run at seeded moments and start it again, until it is done; compare it bit by bit with one that was left alone.

python bench/kill_train.py [kills] [steps] [seed]
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())"]
SETTINGS = [
    "model.shape.heads=2", "model.shape.width=32", "model.shape.dropout=0.1", "train.length=32", "train.batch=8",
    "train.log_every=1", "train.save_every=5", "train.evaluate_every=10", "train.warmup=5", "train.learning_rate=3e-3", "engine.device=cpu",
]  # fmt: skip


def textmill(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One call of the command, to its end."""
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=300, **options)


def prepared(root: Path) -> None:
    """Corpus, tokenizer and tokens for the runs to come."""
    for verb in ("prepare", "tokenize"):
        done = textmill(verb, "quickstart", f"folder={root}", "tokenizer.vocab=300")
        assert done.returncode == 0, done.stderr


def trained(root: Path, run: Path, steps: int) -> list[str]:
    """The words that train one run."""
    return ["train", "quickstart", f"folder={root}", "tokenizer.vocab=300", f"train.folder={run}", f"train.steps={steps}", *SETTINGS]


def numbers_of(run: Path) -> list[dict[str, Any]]:
    """What was logged, without what a clock decides."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def last_weights(run: Path, steps: int) -> str:
    """A hash of the last checkpoint's weights and moments."""
    folder = run / f"step-{steps:07d}"
    return hashlib.sha256((folder / "model.safetensors").read_bytes() + (folder / "optimizer.safetensors").read_bytes()).hexdigest()


def killed_until_done(root: Path, run: Path, steps: int, kills: int, seed: int) -> int:
    """Train with so many SIGKILLs, each at a moment drawn after the first metrics of its sitting; return how many hit."""
    dice, hits = random.Random(seed), 0
    metrics = run / "metrics.jsonl"
    for _ in range(kills):
        size = metrics.stat().st_size if metrics.exists() else -1
        process = subprocess.Popen([*COMMAND, *trained(root, run, steps)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            now = metrics.stat().st_size if metrics.exists() else -1
            if now not in (size, -1):
                break
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.35))
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hits += 1
        process.wait()
        if (run / f"step-{steps:07d}").exists():
            break  # it came through before the next blow
    done = textmill(*trained(root, run, steps))
    assert done.returncode == 0, done.stderr
    return hits


def main(kills: int = 20, steps: int = 60, seed: int = 1) -> int:
    """The campaign; its figures go to docs/benchmarks.md."""
    with tempfile.TemporaryDirectory() as folder:
        root, alone, killed = Path(folder), Path(folder) / "alone", Path(folder) / "killed"
        prepared(root)
        done = textmill(*trained(root, alone, steps))
        assert done.returncode == 0, done.stderr
        hits = killed_until_done(root, killed, steps, kills, seed)
        lines = numbers_of(alone)
        same = sum(one == other for one, other in zip(lines, numbers_of(killed), strict=True))
        weights = last_weights(alone, steps) == last_weights(killed, steps)
        print(f"{hits} SIGKILLs in {steps} steps: {same} of {len(lines)} logged lines bitwise equal; weights and moments equal: {weights}")
        return 0 if same == len(lines) and weights and hits == kills else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
