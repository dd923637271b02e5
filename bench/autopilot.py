"""The regret of `textmill new`: its untouched defaults against tuned trials and nanoGPT, on the same text and minutes.

    python bench/autopilot.py CELL FOLDER [data=FOLDER] [nanogpt=FOLDER] [device=cpu] [seeds=3] [trials=N] [minutes=N]

CELL is a name from CELLS. data: the folder with the text files. nanogpt: a copy of nanoGPT, run with three learning
rates (rates=...).
What is finished is kept in FOLDER/results.json, and the same command continues.

    python bench/autopilot.py nanogpt-split FOLDER data=FOLDER [seeds=1] [minutes=1] ['also=KEY=VALUE ...;...']

trains on the first nine tenths of Shakespeare, as nanoGPT does, and prints the seconds from the start to each stage and
to the first steps, the settings, and bits per byte of the last tenth, which nothing else reads. also: each further run
has the same data and seed 1, with these settings changed.

Bits per byte are those of the test split, by `textmill evaluate`, in windows of the plan's length; settings are chosen
on the valid split. Regret: the mean of the defaults over the seeds, minus the best tuned run or the best of nanoGPT.
Minutes count the entire `textmill run`; nanoGPT gets them for training alone.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from textmill.config import RunConfig
from textmill.tokens.store import open_store
from textmill.where import open_where


@dataclass(frozen=True)
class Cell:
    """A text and a number of minutes."""

    file: str
    minutes: float
    trials: int
    """0: the default run only."""
    max_bytes: float = math.inf
    source: str = ""
    """The beginning of a document's `source`."""
    held_out: float = 0.0
    """This last part of a text file is kept for evaluation."""


CELLS = {
    "tiny": Cell("tinyshakespeare/input.txt", 0.6, 1, 2e5),
    "nanogpt-split": Cell("tinyshakespeare/input.txt", 1, 0, held_out=0.1),
    "english-1mb-cpu": Cell("tinyshakespeare/input.txt", 5, 8),
    "korean-12mb-cpu": Cell("ko.jsonl.xz", 5, 8, 12e6, "korean-assembly"),
    "korean-12mb": Cell("ko.jsonl.xz", 1, 12, 12e6, "korean-assembly"),
    "turkish-60mb": Cell("tr.jsonl.xz", 1, 12),
    "korean-106mb": Cell("ko.jsonl.xz", 3, 8),
    "english-200mb": Cell("en.jsonl.xz", 3, 8, 2e8),
    "korean-12mb-9": Cell("ko.jsonl.xz", 9, 0, 12e6, "korean-assembly"),
    "turkish-60mb-9": Cell("tr.jsonl.xz", 9, 0),
    "korean-106mb-9": Cell("ko.jsonl.xz", 9, 0),
    "english-200mb-9": Cell("en.jsonl.xz", 9, 0, 2e8),
}
RATES, TIMED_STEPS = "6e-4,1e-3,2e-3", 60
"""nanoGPT's learning rates, and the steps of a first run of it that is only timed."""


def documents(path: Path, cell: Cell) -> Iterator[str]:
    """The texts of a cell, up to its bytes; a plain text file is cut at blank lines."""
    if path.suffix == ".txt":
        texts: Iterator[str] = iter(path.read_text(encoding="utf-8").split("\n\n"))
    else:
        opened = lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8")
        rows = map(json.loads, opened)
        texts = (row["text"] for row in rows if str(row.get("source", "")).startswith(cell.source))
    left = cell.max_bytes
    for text in texts:
        left -= len(text.encode())
        if left < 0:
            return
        yield text


def write_text(path: Path, data: Path, cell: Cell) -> None:
    """Write the texts of a cell as JSON lines, unless the file exists."""
    if path.is_file():
        return
    part = path.with_suffix(".part")
    with part.open("w", encoding="utf-8") as stream:
        for text in documents(data / cell.file, cell):
            stream.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    part.rename(path)


class Bench:
    """One cell in one folder."""

    def __init__(self, name: str, folder: Path, options: dict[str, str]) -> None:
        self.cell, self.folder, self.options = CELLS[name], folder.absolute(), options
        self.minutes = float(options.get("minutes", self.cell.minutes))
        self.trials = int(options.get("trials", self.cell.trials))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.text, self.path = self.folder / "text.jsonl", self.folder / "results.json"
        self.held_out = self.folder / "held_out.txt"
        if self.cell.held_out:
            self.text = self.folder / "text.txt"
            data = (Path(options["data"]) / self.cell.file).read_bytes()
            size = int((1 - self.cell.held_out) * len(data))
            self.text.write_bytes(data[:size])
            self.held_out.write_bytes(data[size:])
        else:
            write_text(self.text, Path(options["data"]), self.cell)
        self.results: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def once(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A result, measured unless an earlier call has finished it."""
        if key not in self.results:
            self.results[key] = measure()
            self.path.write_text(json.dumps(self.results, indent=1))
            print(f"{key}: {json.dumps(self.results[key])}", flush=True)
        found: dict[str, Any] = self.results[key]
        return found

    def textmill(self, *words: str) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run([sys.executable, "-m", "textmill", *words], capture_output=True, text=True, check=False)
        with (self.folder / "log").open("a") as log:
            log.write(f"$ textmill {' '.join(words)}\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            sys.exit(f"textmill {' '.join(words)}: {done.stderr[-2000:]}")
        return done.stdout

    @property
    def device(self) -> list[str]:
        return [f"engine.device={self.options['device']}"] if "device" in self.options else []

    def test_bits(self, where: str, *settings: str) -> float:
        """Bits per byte of the test split, or of the part that was kept."""
        text = f"evaluate.text={self.held_out}" if self.cell.held_out else "evaluate.split=test"
        out = self.textmill("evaluate", where, text, "--json", *self.device, *settings)
        bits: float = json.loads(out.splitlines()[-1])["perplexity"]["bits_per_byte"]
        return bits

    def run_default(self, name: str, minutes: float, seed: int) -> dict[str, Any]:
        """What `new` and `run` give with nothing changed but the seed."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)  # of a call that was stopped: its time would be wrong
        self.textmill("new", str(root), "--text", str(self.text), "--minutes", f"{minutes:g}")
        start = time.monotonic()
        self.textmill("run", str(root), f"train.seed={seed}", *self.device)
        seconds = time.monotonic() - start
        return {
            "bits": self.test_bits(str(root)),
            "seconds": seconds,
            "minutes": minutes,
            "last_minus_best": self.last_minus_best(root),
        }

    def last_minus_best(self, root: Path, run: str = "run") -> float:
        """How much worse the last valid loss is than the lowest one, in bits per byte."""
        rows = map(json.loads, (root / run / "metrics.jsonl").read_text().splitlines())
        losses = [row["valid_loss"] for row in rows if row.get("valid_loss") is not None]
        valid = json.loads((root / "tokens" / "manifest.json").read_text())["splits"]["valid"]
        return float((losses[-1] - min(losses)) * valid["tokens"] / valid["bytes"] / math.log(2))

    def run_timed(self, seed: int, settings: str) -> dict[str, Any]:
        """One run, with the seconds from the start of `run` until each stage and the first steps."""
        root = self.folder / "default-1"
        run = root / f"run-{len(self.results)}"
        began = time.monotonic()
        if not root.exists():
            self.textmill("new", str(root), "--text", str(self.text), "--minutes", f"{self.minutes:g}")
        new_seconds = time.monotonic() - began
        words = [f"train.folder={run}", f"train.seed={seed}", *settings.split(), *self.device]
        command = [sys.executable, "-u", "-m", "textmill", "run", str(root), *words]
        began = time.monotonic()
        stages = {}
        with (
            (self.folder / "log").open("a") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                if found := re.match(r"\[\d/6\] \w+|step +\d+(?=/)|train: \d.* steps", line):
                    stages[found.group()] = round(time.monotonic() - began, 1)
        seconds = time.monotonic() - began
        if process.returncode:
            sys.exit((self.folder / "log").read_text()[-2000:])
        steps = [name for name in stages if name.startswith("step")]
        kept = {name: at for name, at in stages.items() if name not in steps[2:-1]}
        last_minus_best = self.last_minus_best(root, run.name)
        written = yaml.safe_load((root / "textmill.yaml").read_text())
        planned = {name: written[name] for name in ("model", "train", "tokenizer")}
        bits = self.test_bits(str(run))
        return {
            "bits": bits,
            "new_seconds": round(new_seconds, 1),
            "seconds": round(seconds, 1),
            "minutes": self.minutes,
            "last_minus_best": last_minus_best,
            "at": kept,
            "settings": settings,
            "planned": planned,
        }

    def run_tuned(self) -> dict[str, Any]:
        """The best settings of trials of full length, then one run with them."""
        root = self.folder / "default-1"
        minutes = 1.1 * self.minutes * max(8, self.trials) if self.trials >= 8 else self.minutes * self.trials
        self.textmill("tune", str(root), "--minutes", f"{minutes:g}", *self.device)
        best = json.loads((root / "tune" / "trials.json").read_text())["best"]
        self.textmill("run", str(root / "tuned.yaml"), *self.device)
        return {"bits": self.test_bits(str(root / "tuned.yaml")), "changes": best["changes"], "worth": best["worth"]}

    def run_nanogpt(self, rate: str) -> dict[str, Any]:
        """nanoGPT with the plan's net, tokens and batch, AdamW, and as many steps as fit in the minutes."""
        root, config = self.folder / "default-1", open_where(str(self.folder / "default-1"), []).config
        data, out = self.folder / "nanogpt-data", self.folder / f"nanogpt-{rate}"
        vocab = json.loads((root / "tokens" / "manifest.json").read_text())["vocab"]
        write_nanogpt_data(root / "tokens", data, vocab)
        seconds, step = self.train_nanogpt(config, data, out, rate, TIMED_STEPS)
        steps = max(TIMED_STEPS, int((60 * self.minutes - max(0.0, seconds - TIMED_STEPS * step)) / step))
        took, _ = self.train_nanogpt(config, data, out, rate, steps)
        model, tokenizer = self.folder / f"nanogpt-{rate}-hf", str(root / "tokenizer")
        if not model.exists():
            self.textmill("import", str(out / "ckpt.pt"), str(model), "--tokenizer", tokenizer, "--vocab", str(vocab))
        bits = self.test_bits(str(model), f"tokens.folder={root / 'tokens'}", f"train.length={config.train.length}")
        return {"bits": bits, "steps": steps, "seconds": took}

    def train_nanogpt(self, config: RunConfig, data: Path, out: Path, rate: str, steps: int) -> tuple[float, float]:
        """Seconds of a run of its train.py, and the median of its steps' seconds."""
        shape: Any = config.model.shape
        device = self.options.get("device", "cuda")
        settings = {
            "dataset": data,
            "out_dir": out,
            "device": device,
            "compile": device != "cpu",
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_embd": shape.width,
            "block_size": config.train.length,
            "bias": True,
            "batch_size": config.train.batch,
            "gradient_accumulation_steps": 1,
            "dropout": shape.dropout,
            "learning_rate": rate,
            "min_lr": float(rate) / 10,
            "warmup_iters": max(1, steps // 20),
            "max_iters": steps,
            "lr_decay_iters": steps,
            "eval_interval": steps,
            "eval_iters": 1,
            "always_save_checkpoint": True,
            "log_interval": 1 if steps == TIMED_STEPS else 1000,
            "dtype": "bfloat16" if device != "cpu" else "float32",
        }
        words = [f"--{key}={value}" for key, value in settings.items()]
        start = time.monotonic()
        program = str(Path(self.options["nanogpt"]) / "train.py")
        done = subprocess.run(
            [sys.executable, program, *words], cwd=self.options["nanogpt"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"nanoGPT: {done.stderr[-2000:]}")
        logged = [float(one) / 1e3 for one in re.findall(r"^iter \d+: .*time ([\d.]+)ms", done.stdout, re.MULTILINE)]
        return time.monotonic() - start, statistics.median(logged)

    def report(self) -> str:
        """The table of the cell."""
        found = self.results
        defaults = [one for key, one in found.items() if key.startswith("default-")]
        others = {key: one["bits"] for key, one in found.items() if key.startswith(("tuned", "nanogpt"))}
        mean = statistics.mean(one["bits"] for one in defaults)
        lines = ["| what | bits per byte |", "|---|---|"]
        lines += [f"| defaults, mean of {len(defaults)} seeds | {mean:.4f} |"]
        lines += [f"| {key} | {bits:.4f} |" for key, bits in others.items()]
        if others:
            lines.append(f"| regret | {mean - min(others.values()):+.4f} |")
        worst = max(defaults, key=lambda one: abs(one["seconds"] - 60 * one["minutes"]))
        lines.append(f"| last checkpoint minus best | {max(one['last_minus_best'] for one in defaults):.4f} |")
        lines.append(f"| seconds of the command, of {60 * worst['minutes']:.0f} | {worst['seconds']:.0f} |")
        return "\n".join(lines)

    def run(self) -> None:
        """Everything that is not finished yet, then the table."""
        if self.cell.held_out:
            runs = [(seed, "") for seed in range(1, int(self.options.get("seeds", "1")) + 1)]
            runs += [(1, settings) for settings in self.options.get("also", "").split(";") if settings]
            for seed, settings in runs:
                name = f"seed {seed} {settings}".strip()
                self.once(name, lambda seed=seed, settings=settings: self.run_timed(seed, settings))  # type: ignore[misc]
            return
        for seed in range(1, int(self.options.get("seeds", "3")) + 1):
            self.once(f"default-{seed}", lambda seed=seed: self.run_default(f"default-{seed}", self.minutes, seed))  # type: ignore[misc]
        if self.trials:
            self.once("tuned", self.run_tuned)
        for rate in self.options.get("rates", RATES).split(",") if "nanogpt" in self.options else []:
            self.once(f"nanogpt-{rate}", lambda rate=rate: self.run_nanogpt(rate))  # type: ignore[misc]
        print(self.report())


def write_nanogpt_data(tokens: Path, folder: Path, vocab: int) -> None:
    """The token ids as nanoGPT reads them; meta.pkl is the dictionary {"vocab_size": vocab}, written by hand."""
    folder.mkdir(exist_ok=True)
    for split, name in (("train", "train"), ("valid", "val")):
        ids = open_store(tokens / split).ids
        np.asarray(ids).astype(np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(b"(dp0\nVvocab_size\np1\nI%d\ns." % vocab)


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in CELLS:
        sys.exit(f"{__doc__}\nCells: {', '.join(CELLS)}")
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    Bench(sys.argv[1], Path(sys.argv[2]), {"data": "", **options}).run()


if __name__ == "__main__":
    main()
