"""JAX against torch on the same rows: GPT-2 trained on WikiText-2 in Parquet features, as the recipe jax-wikitext does.

    python bench/features_engines.py DATA [out=FOLDER] [engines=torch,jax] [size=small] [steps=300] [batch=64]
                                     [precision=bf16] [device=auto] [vocab=8192]

DATA has train.txt, valid.txt and test.txt. Both engines start from the same weights and take the same rows in the same
order, each in its own process through `textmill train`. Printed for each: tokens/s in the last half of the steps,
seconds of the command, the loss of the last logged step and the validation loss; then the largest relative difference
of their training losses. On a CPU: size=nano steps=20 batch=4 precision=fp32 device=cpu vocab=512.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

DEFAULTS = {
    "engines": "torch,jax",
    "size": "small",
    "steps": "300",
    "batch": "64",
    "precision": "bf16",
    "device": "auto",
    "vocab": "8192",
}
LENGTH = 256


@dataclass(frozen=True)
class Trained:
    """What one engine did."""

    seconds: float
    tokens_per_second: float
    losses: list[float]
    valid: float


def main() -> None:
    """Write the features once, then train with each engine."""
    options = DEFAULTS | dict(word.split("=", 1) for word in sys.argv[2:])
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(options.get("out", temporary)).resolve()
        common = settings_of(Path(sys.argv[1]).resolve(), out, options)
        for command in ("prepare", "fit-tokenizer", "tokenize"):
            textmill(command, common)
        found = {}
        print(f"{date.today()}, {platform.machine()}, torch {version('torch')}, jax {version('jax')}", flush=True)
        print(f"{'engine':<8} {'tokens/s':>9} {'seconds':>8} {'last loss':>10} {'valid loss':>11}")
        for engine in options["engines"].split(","):
            found[engine] = one = train(engine, common, out, options)
            row = f"{one.tokens_per_second:9,.0f} {one.seconds:8.1f} {one.losses[-1]:10.4f} {one.valid:11.4f}"
            print(f"{engine:<8} {row}", flush=True)
    if len(found) == 2:
        first, second = found.values()
        worst = max(abs(a - b) / a for a, b in zip(first.losses, second.losses, strict=True))
        print(f"largest difference of {len(first.losses)} training losses: {worst:.1e}")
        print(f"validation loss: {abs(first.valid - second.valid) / first.valid:.1e}")


def settings_of(data: Path, out: Path, options: dict[str, str]) -> list[str]:
    """The settings of all commands: rows as in the recipe jax-wikitext, a vocabulary of the text's own."""
    files = {split: data / f"{split}.txt" for split in ("train", "valid", "test")}
    splits = ",".join(f"{path}:{split}" for split, path in files.items())
    return [
        *(f"corpus.sources=[{','.join(map(str, files.values()))}]", f"corpus.source_splits={splits}", f"folder={out}"),
        *("corpus.dedup=none", f"tokenizer.vocab={options['vocab']}", "tokens.kind=features", "train.layout=features"),
        *(f"train.length={LENGTH}", f"model.size={options['size']}", f"train.batch={options['batch']}"),
        *(f"train.steps={options['steps']}", "train.preset=none", "train.learning_rate=3e-4", "train.warmup=0"),
        *("train.log_every=1", f"train.evaluate_every={options['steps']}", f"train.save_every={options['steps']}"),
    ]


def train(engine: str, common: list[str], out: Path, options: dict[str, str]) -> Trained:
    """Train with one engine in its own run folder."""
    folder = out / f"run-{engine}"
    own = [f"engine.kind={engine}", f"engine.device={options['device']}", f"engine.precision={options['precision']}"]
    own += ["engine.compile=true"] if engine == "torch" and options["device"] != "cpu" else []
    start = time.perf_counter()
    textmill("train", [*common, *own, f"train.folder={folder}"])
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if "loss" in line and "tokens_per_second" in line]
    valid = [line["valid_loss"] for line in lines if "valid_loss" in line]
    later = steps[len(steps) // 2 :]
    speed = median(line["tokens_per_second"] for line in later)
    return Trained(seconds, speed, [line["loss"] for line in steps], valid[-1])


def textmill(command: str, settings: list[str]) -> None:
    """Run a command of textmill to its end."""
    words = [sys.executable, "-m", "textmill", command, "quickstart", *settings]
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
