"""One generation of self-distillation on a small text, with the settings that `textmill new` plans for it, on a CPU.

    python bench/self_distil.py TEXT [--kilobytes 100] [--seeds 2] [--epochs 25] [--folder FOLDER]

TEXT is a plain text file. Its first kilobytes are the text to train on; as many twice after them are held out. For each
seed, the planned run is trained, then the same run from other random weights with the first as its teacher. Prints
bits per byte of the held-out text for both. Finished runs in FOLDER are not run again.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import textmill
from textmill.where import open_where


def write_texts(source: Path, size: int, folder: Path) -> None:
    """Write the text to train on and the held-out text."""
    with source.open("rb") as file:
        for name, count in (("train.txt", size), ("held_out.txt", 2 * size)):
            (folder / name).write_text(file.read(count).decode(errors="ignore"))


def train(folder: Path, name: str, seed: int, epochs: int, *settings: str) -> dict[str, Any]:
    """Train a run of the project in `folder`; return the metrics of the held-out text."""
    run = folder / f"{name}-{seed}"
    length = "train.minutes=null", f"train.epochs={epochs}", "train.log_every=500"
    own = [f"train.folder={run}", f"train.seed={seed}", f"evaluate.text=[{folder / 'held_out.txt'}]", *length]
    config = open_where(str(folder / "project"), [*own, *settings]).config
    textmill.train(config)
    return dict(textmill.evaluate(config)["perplexity"])


def main() -> None:
    """Plan, train both generations of every seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--kilobytes", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=25, help="as many as `new` plans if the minutes suffice")
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="self-distil-"))
    folder.mkdir(exist_ok=True)
    if not (folder / "project").exists():
        write_texts(options.text, 1000 * options.kilobytes, folder)
        textmill.new(str(folder / "project"), [str(folder / "train.txt")], minutes=30)
    planned = open_where(str(folder / "project"), []).config
    for stage in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
        stage(planned)
    found: list[tuple[float, float]] = []
    for seed in range(1, options.seeds + 1):
        first = train(folder, "first", seed, options.epochs)
        teacher = f"train.distil.teachers=[{folder / f'first-{seed}'}]"
        second = train(folder, "second", seed + 100, options.epochs, teacher)
        found.append((first["bits_per_byte"], second["bits_per_byte"]))
        print(f"seed {seed}: first {found[-1][0]:.4f}, second {found[-1][1]:.4f} bits per byte", flush=True)
    means = [mean(column) for column in zip(*found, strict=True)]
    print(f"mean: first {means[0]:.4f}, second {means[1]:.4f}, {means[1] - means[0]:+.4f} bits per byte")


if __name__ == "__main__":
    main()
