"""Measures how the cost of each stage grows with the text: seconds and peak memory from 1 MB to 1 GB.

    python bench/scale.py [out=FOLDER] [sizes=1,10,100] [evaluate=10] [workers=1] [svg=FILE]

For each size in MB it writes JSON lines of random words (frequencies as in Zipf's law, no duplicates), then runs
prepare, tokenize, evaluate (up to `evaluate` MB) and batch building, each in its own process, and prints its seconds,
CPU seconds and the memory of its largest process, then how time and memory grow with the text: an exponent of 1 is
linear, 0 is constant. `svg` draws both. Texts and results stay in FOLDER (default: a temporary one), and a later call
measures only sizes that are not there.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd")
WIDTH, HEIGHT, EDGE = 420, 320, 60
STAGES = ("prepare", "tokenize", "evaluate", "open batches", "1,000 batches")
WORDS_PER_DOCUMENT = 170
"""About 1,000 characters."""
BLOCK = 1000
"""Documents that are drawn together."""
SETTINGS = ["tokenizer.vocab=1024", "train.length=256", "train.batch=8", "train.warmup=0"]
SETTINGS += ["model.shape.layers=1", "model.shape.heads=1", "model.shape.width=16"]
"""A net that is small enough to evaluate much text on a CPU."""


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float
    cpu: float
    memory: float
    """MB of its largest process."""


def main() -> None:
    """Measure all sizes, the smallest first; print a table, and exponents of growth."""
    options = dict(word.split("=", 1) for word in sys.argv[1:])
    sizes = [int(size) for size in options.get("sizes", "1,10,100").split(",")]
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(options.get("out", temporary)).resolve()
        out.mkdir(parents=True, exist_ok=True)
        found: dict[str, dict[int, Cost]] = {stage: {} for stage in STAGES}
        print(f"{'MB':>6}  {'stage':<14} {'seconds':>9} {'CPU s':>9} {'MB of memory':>13}")
        for size in sizes:
            for stage, cost in measured(out, size, sizes[0], options):
                found[stage][size] = cost
                print(f"{size:>6}  {stage:<14} {cost.seconds:9.2f} {cost.cpu:9.2f} {cost.memory:13.0f}", flush=True)
    print(f"\n{'growth':<14} {'time':>6} {'memory':>7}   exponents between the two largest sizes")
    for stage, costs in found.items():
        if len(costs) > 1:
            (small, first), (large, last) = list(costs.items())[-2:]
            ratio = math.log(large / small)
            times, memories = (math.log(b / a) / ratio for a, b in ((first.cpu, last.cpu), (first.memory, last.memory)))
            print(f"{stage:<14} {times:6.2f} {memories:7.2f}")
    if "svg" in options:
        draw(found, Path(options["svg"]))


def measured(out: Path, size: int, smallest: int, options: dict[str, str]) -> list[tuple[str, Cost]]:
    """The costs of one size: stored ones, or new ones."""
    path = out / f"costs-{size}.json"
    if not path.is_file():
        costs = measure(out, size, smallest, options)
        path.write_text(json.dumps({stage: asdict(cost) for stage, cost in costs}), encoding="utf-8")
    return [(stage, Cost(**cost)) for stage, cost in json.loads(path.read_text(encoding="utf-8")).items()]


def measure(out: Path, size: int, smallest: int, options: dict[str, str]) -> list[tuple[str, Cost]]:
    """The stages of one size; the tokenizer is fitted once, on the smallest."""
    texts, folder = out / f"{size}.jsonl", out / f"run-{size}"
    if not texts.is_file():
        write_texts(texts, size)
    tokenizer, model = out / "tokenizer", out / f"run-{smallest}"
    settings = [f"corpus.sources={texts}", f"folder={folder}", f"tokenizer.folder={tokenizer}", *SETTINGS]
    settings += [f"runner.workers={options.get('workers', '1')}", "engine.device=cpu"]
    costs = [("prepare", run(textmill("prepare", *settings)))]
    if not tokenizer.is_dir():
        first = [f"corpus.sources={out / f'{smallest}.jsonl'}" if "sources" in word else word for word in settings]
        run(textmill("fit-tokenizer", *first, "tokenizer.fit_on=sources"))
    settings.append("tokenizer.fit_on=sources")
    settings = [f"tokenizer.use={tokenizer}", *(word for word in settings if not word.startswith("tokenizer."))]
    run(textmill("fit-tokenizer", *settings))
    costs.append(("tokenize", run(textmill("tokenize", *settings))))
    if size == smallest:
        run(textmill("train", *settings, "train.steps=2"))
    if size <= int(options.get("evaluate", "10")):
        use = [
            "evaluate.split=train",
            "evaluate.baselines=false",
            "engine.device=cpu",
            f"tokens.folder={folder}/tokens",
        ]
        words = [sys.executable, "-m", "textmill", "evaluate", str(model), *use]
        costs.append(("evaluate", run(words)))
    own = [sys.executable, "-m", "bench.scale_batches", str(folder / "tokens" / "train"), str(out / f"index-{size}")]
    opened = run([*own, "0"])
    built = run([*own, "1000"])
    costs.append(("open batches", opened))
    costs.append(("1,000 batches", Cost(built.seconds - opened.seconds, built.cpu - opened.cpu, built.memory)))
    return costs


def textmill(command: str, *settings: str) -> list[str]:
    return [sys.executable, "-m", "textmill", command, "quickstart", *settings]


def run(words: list[str]) -> Cost:
    """Run a process to its end."""
    clock = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{' '.join(words)}: {message.decode()[-2000:]}")
    return Cost(time.perf_counter() - clock, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e3)


def write_texts(path: Path, size: int) -> None:
    """Write `size` MB of JSON lines; the first lines of all sizes are the same."""
    dice = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
    words = np.array(["".join(dice.choice(letters[:20], dice.integers(2, 9))) for _ in range(20_000)])
    chances = 1 / np.arange(1, len(words) + 1)
    edges = np.cumsum(chances / chances.sum())
    written, part = 0, path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as stream:
        while written < size * 1_000_000:
            drawn = words[np.searchsorted(edges, dice.random((BLOCK, WORDS_PER_DOCUMENT))).clip(max=len(words) - 1)]
            for row in drawn:
                written += stream.write(json.dumps({"text": " ".join(row.tolist()) + "."}) + "\n")
                if written >= size * 1_000_000:
                    break
    part.rename(path)


def draw(found: dict[str, dict[int, Cost]], path: Path) -> None:
    """Draw CPU seconds and memory against the size, side by side, with logarithmic axes."""
    parts = [
        panel(found, kind, title, EDGE + number * (WIDTH + EDGE))
        for number, (kind, title) in enumerate((("cpu", "CPU seconds"), ("memory", "MB of memory")))
    ]
    for number, (stage, color) in enumerate(zip(found, COLORS, strict=True)):
        parts.append(text(EDGE + 170 * number, HEIGHT + 55, stage, color, "start"))
    size = f'viewBox="0 0 {2 * (WIDTH + EDGE) + 20} {HEIGHT + 70}"'
    style = 'font-family="sans-serif" font-size="13"'
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n")


def panel(found: dict[str, dict[int, Cost]], kind: str, title: str, left: int) -> str:
    """One diagram: a curve for each stage, and a line at every power of ten."""
    points = {
        stage: [(math.log10(size), math.log10(max(getattr(cost, kind), 0.01))) for size, cost in costs.items()]
        for stage, costs in found.items()
    }
    every = [point for curve in points.values() for point in curve]
    x_range, y_range = ((math.floor(min(axis)), math.ceil(max(axis))) for axis in zip(*every, strict=True))

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = ((v - low) / max(1, high - low) for v, (low, high) in ((x, x_range), (y, y_range)))
        return left + across * (WIDTH - 20), HEIGHT - up * (HEIGHT - 30)

    parts = [text(left, 16, title, "#888888", "start"), text(left + WIDTH / 2, HEIGHT + 36, "MB of text", "#888888")]
    for power in range(y_range[0], y_range[1] + 1):
        y = place(x_range[0], power)[1]
        parts.append(f'<path stroke="#888888" stroke-opacity="0.3" d="M{left},{y:.1f}h{WIDTH - 20}"/>')
        parts.append(text(left - 6, y + 4, f"{10.0**power:g}", "#888888", "end"))
    parts += [text(place(p, 0)[0], HEIGHT + 18, f"{10**p:,}", "#888888") for p in range(x_range[0], x_range[1] + 1)]
    for curve, color in zip(points.values(), COLORS, strict=True):
        if curve:
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in curve))
            parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{line}"/>')
    return "\n".join(parts)


def text(x: float, y: float, content: str, color: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{content}</text>'


if __name__ == "__main__":
    main()
