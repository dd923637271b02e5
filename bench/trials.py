"""Train many nets on one text with different settings, several at a time, and print bits per byte on the valid split.

    python bench/trials.py TEXT FOLDER SECONDS JOBS < trials.txt

A line of standard input is one trial: `vocab=8192 layers=4 width=256` and any `section.key=value` of textmill;
lines that start with # are skipped. TEXT is prepared once, and tokenized once for each vocabulary. Every trial runs
its complete schedule, since unfinished schedules must not be compared; those that are not finished after SECONDS
are stopped and marked. The clock of a trial means little when several share a device.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SHORT = {
    "layers": "model.shape.layers",
    "width": "model.shape.width",
    "heads": "model.shape.heads",
    "length": "train.length",
    "batch": "train.batch",
    "epochs": "train.epochs",
    "steps": "train.steps",
    "lr": "train.learning_rate",
    "wd": "train.weight_decay",
    "dropout": "model.shape.dropout",
    "rest": "train.muon.adamw_rate_factor",
    "momentum": "train.muon.momentum",
    "seed": "train.seed",
    "optimizer": "train.optimizer",
}
"""Short names of the settings that trials change most."""
ALWAYS = [
    "train.optimizer=muon",
    "train.muon.momentum=0.9",
    "train.betas=[0.9,0.95]",
    "train.warmup=0.05",
    "train.log_every=50",
    "train.evaluate_every=1000000",
    "train.save_every=1000000",
    "train.checkpoints.keep=1",
    "model.size=small",
]


def textmill(*words: str, log: Path, limit: float | None = None) -> bool:
    """Run a command; its output goes to a log. False: it failed or was stopped."""
    with log.open("a") as stream:
        command = [sys.executable, "-m", "textmill", *words]
        try:
            done = subprocess.run(command, stdout=stream, stderr=stream, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def valid_size(folder: Path) -> tuple[int, int]:
    """Tokens and bytes of the valid split."""
    valid = json.loads((folder / "tokens" / "manifest.json").read_text())["splits"]["valid"]
    return int(valid["tokens"]), int(valid["bytes"])


class Trials:
    """Trials on one text."""

    def __init__(self, text: str, folder: Path, seconds: float) -> None:
        self.text, self.folder, self.end = text, folder, time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.common = [f"corpus.sources=[{text}]", "corpus.folder=" + str(folder / "corpus")]
        if not textmill("prepare", "bench/trials.yaml", f"folder={folder}", *self.common, log=folder / "log"):
            sys.exit((folder / "log").read_text()[-2000:])

    def tokenized(self, vocab: str) -> Path:
        """The folder of tokens with a vocabulary of this size."""
        place = self.folder / f"v{vocab}"
        if not (place / "tokens" / "manifest.json").is_file():
            words = ["bench/trials.yaml", f"folder={place}", *self.common, f"tokenizer.vocab={vocab}"]
            place.mkdir(exist_ok=True)
            for command in ("fit-tokenizer", "tokenize"):
                if not textmill(command, *words, log=place / "log"):
                    sys.exit((place / "log").read_text()[-2000:])
        return place

    def run(self, number: int, line: str) -> str:
        """One trial; the line of its result."""
        given = dict(word.split("=", 1) for word in line.split())
        vocab = given.pop("vocab")
        place, run = self.folder / f"v{vocab}", self.folder / f"t{number}"
        if "heads" not in given and "width" in given:
            given["heads"] = str(max(1, int(given["width"]) // 64))
        words = [f"{SHORT.get(key, key)}={value}" for key, value in given.items()]
        words = [f"folder={place}", *self.common, f"tokenizer.vocab={vocab}", f"train.folder={run}", *ALWAYS, *words]
        began = time.monotonic()
        finished = textmill(
            "train", "bench/trials.yaml", *words, log=Path(f"{run}.log"), limit=max(1.0, self.end - began)
        )
        seconds = time.monotonic() - began
        metrics = run / "metrics.jsonl"
        rows = [json.loads(row) for row in metrics.read_text().splitlines()] if metrics.is_file() else []
        losses = [row["valid_loss"] for row in rows if "valid_loss" in row]
        rates = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        if not finished or not losses:
            why = "stopped" if rates else Path(f"{run}.log").read_text()[-300:]
            return f"   -    {line}  | {why!r} at step {rows[-1]['step'] if rows else 0}"
        tokens, size = valid_size(place)
        bits = losses[-1] * tokens / size / math.log(2)
        return f"{bits:.4f}  {line}  | loss {losses[-1]:.4f}, {seconds:.0f} s, {max(rates):,.0f} tokens/s"


def main() -> None:
    text, folder, seconds, jobs = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    lines = [line.strip() for line in sys.stdin if line.strip() and not line.startswith("#")]
    trials = Trials(os.path.abspath(text), folder.absolute(), seconds)
    for vocab in dict.fromkeys(dict(word.split("=", 1) for word in line.split())["vocab"] for line in lines):
        trials.tokenized(vocab)
    sizes = [(place.name, *valid_size(place)) for place in sorted(folder.glob("v*"))]
    print(f"tokens and bytes of valid: {sizes}; {trials.end - time.monotonic():.0f} s left", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda one: print(trials.run(*one), flush=True), enumerate(lines)))


if __name__ == "__main__":
    main()
