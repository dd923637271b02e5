"""Generations of self-distillation on a text, with the settings that `textmill new` plans for it.

    python bench/self_distil.py TEXT [--kilobytes 100] [--seeds 2] [--epochs 25] [--generations 2] [--teachers 1]
                                     [--folder FOLDER] [KEY=VALUE ...]

TEXT is a plain text file. Its first kilobytes are the text to train on; up to twice as many after them are held out.
For each seed, the planned run is trained, then the same run from other random weights with the last generations (as
many as --teachers) as its teachers. Prints bits per byte of the held-out text for all, and their seconds. Settings
apply to the generations after the first. Finished runs in FOLDER are not run again.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import mean

import textmill
from textmill.where import open_where


def write_texts(source: Path, size: int, folder: Path) -> None:
    """Write the text to train on and the held-out text."""
    with source.open("rb") as file:
        for name, count in (("train.txt", size), ("held_out.txt", 2 * size)):
            (folder / name).write_text(file.read(count).decode(errors="ignore"))


def train(folder: Path, name: str, seed: int, epochs: int, *settings: str) -> tuple[float, float]:
    """Train a run of the project in `folder`; return bits per byte of the held-out text, and seconds."""
    run, started = folder / f"{name}-{seed}", time.perf_counter()
    length = "train.minutes=null", f"train.epochs={epochs}", "train.log_every=500"
    own = [f"train.folder={run}", f"train.seed={seed}", f"evaluate.text=[{folder / 'held_out.txt'}]", *length]
    config = open_where(str(folder / "project"), [*own, *settings]).config
    textmill.train(config)
    seconds = time.perf_counter() - started
    return dict(textmill.evaluate(config)["perplexity"])["bits_per_byte"], seconds


def main() -> None:
    """Plan, train all generations of every seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--kilobytes", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=25, help="as many as `new` plans if the minutes suffice")
    parser.add_argument("--generations", type=int, default=2)
    parser.add_argument("--teachers", type=int, default=1, help="how many of the last generations teach the next")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_intermixed_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="self-distil-"))
    folder.mkdir(exist_ok=True)
    if not (folder / "project").exists():
        write_texts(options.text, 1000 * options.kilobytes, folder)
        textmill.new(str(folder / "project"), [str(folder / "train.txt")], minutes=options.minutes)
    planned = open_where(str(folder / "project"), []).config
    for stage in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
        stage(planned)
    losses: list[list[float]] = []
    for seed in range(1, options.seeds + 1):
        runs: list[Path] = []
        losses.append([])
        for number in range(options.generations):
            settings = [f"train.distil.teachers=[{','.join(map(str, runs[-options.teachers :]))}]", *options.settings]
            name = f"generation-{number + 1}"
            bits, seconds = train(folder, name, seed + 100 * number, options.epochs, *(settings if number else []))
            runs.append(folder / f"{name}-{seed + 100 * number}")
            losses[-1].append(bits)
            print(f"seed {seed}, generation {number + 1}: {bits:.4f} bits per byte, {seconds:.0f} s", flush=True)
    print("means: " + ", ".join(f"{mean(column):.4f}" for column in zip(*losses, strict=True)))


if __name__ == "__main__":
    main()
