"""The regret of `textmill new` in a cell of autopilot.py, with the runs side by side on one machine with many cores.

    python bench/autopilot_lanes.py CELL FOLDER data=FOLDER [lanes=7] [cores=2] [first=2] [seeds=2] [minutes=N]
                                    [only=PART,...] [also="KEY=VALUE KEY=VALUE; KEY=VALUE"] [gpu=0]

`new` is called once. A run is a whole `textmill run` on `cores` cores of its own, the first lane from core number
`first` on; a trial changes one setting of the plan by a step, or the vocabulary. only: the trials with one of these
parts in their names. also: further trials, separated by semicolons. gpu=1: the first run has the GPU for itself; the
others then run side by side with as many steps, and only the trials whose steps take as long. What is finished is
kept in FOLDER/results.json, and the same command continues.

The best trial is chosen on the valid split; regret is the difference on the test split.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from autopilot import CELLS, write_text

from textmill.config import RunConfig
from textmill.planning.trials import candidates
from textmill.planning.tuning import net_numbers
from textmill.where import open_where

OPTIONS = {
    "data": "",
    "lanes": "7",
    "cores": "2",
    "first": "2",
    "seeds": "2",
    "minutes": "",
    "only": "",
    "also": "",
    "gpu": "0",
}


class Lanes:
    """Runs of one cell, each on its own cores."""

    def __init__(self, name: str, folder: Path, options: dict[str, str]) -> None:
        self.cell, self.folder, self.options = CELLS[name], folder.absolute(), OPTIONS | options
        self.minutes = float(self.options["minutes"] or self.cell.minutes)
        self.on_gpu, self.each = self.options["gpu"] == "1", int(self.options["cores"])
        self.lanes: queue.Queue[str] = queue.Queue()
        for lane in range(int(self.options["lanes"])):
            first = int(self.options["first"]) + lane * self.each
            self.lanes.put(",".join(map(str, range(first, first + self.each))))
        self.lock = threading.Lock()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / "results.json"
        self.results: dict[str, Any] = json.loads(self.path.read_text()) if self.path.is_file() else {}

    def textmill(self, cores: str, *words: str) -> str:
        """The output of a command on some cores, which must succeed."""
        command = ["taskset", "-c", cores, sys.executable, "-m", "textmill", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.each)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        with self.lock, (self.folder / "log").open("a") as log:
            log.write(f"$ textmill {' '.join(words)}\n{done.stdout}{done.stderr}\n")
        if done.returncode:
            raise RuntimeError(done.stderr[-500:])
        return done.stdout

    def measure(self, name: str, changes: dict[str, Any]) -> None:
        """Run the plan with these changes, on a free lane, unless it is finished."""
        if name in self.results:
            return
        cores, root = self.lanes.get(), self.folder / name.replace(" ", "-")
        try:
            found = self._run(cores, root, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
        except RuntimeError as error:
            found = {"failed": str(error)}
        self.lanes.put(cores)
        with self.lock:
            self.results[name] = found
            self.path.write_text(json.dumps(self.results, indent=1))
            print(f"{name}: {json.dumps(found)}", flush=True)

    def _run(self, cores: str, root: Path, settings: list[str]) -> dict[str, Any]:
        shutil.rmtree(root, ignore_errors=True)  # of a call that was stopped: its time would be wrong
        root.mkdir()
        shutil.copy(self.folder / "plan" / "textmill.yaml", root)
        start = time.monotonic()
        self.textmill(cores, "run", str(root), *settings)
        seconds = time.monotonic() - start
        bits = {}
        for split in ("valid", "test"):
            out = self.textmill(cores, "evaluate", str(root), f"evaluate.split={split}", "--json", *settings)
            bits[split] = json.loads(out.splitlines()[-1])["perplexity"]["bits_per_byte"]
        rows = [json.loads(row) for row in (root / "run" / "metrics.jsonl").read_text().splitlines()]
        losses = [row["valid_loss"] for row in rows if row.get("valid_loss") is not None]
        return {
            **bits,
            "seconds": round(seconds, 1),
            "steps": max(row["step"] for row in rows if "step" in row),
            "valid_losses": [round(loss, 4) for loss in losses],
        }

    def trials(self, config: RunConfig) -> dict[str, dict[str, Any]]:
        """Changes by name."""
        shape = {"model.shape.layers": 0, "model.shape.heads": 0}
        found = [
            ladder[0]  # the nearest value of a setting in one direction
            for candidate in candidates(config.train, net_numbers(config.model), averages=True)
            for ladder in candidate.ladders
            if candidate.same_speed or not self.on_gpu
        ]
        if not self.on_gpu:
            found += [{"tokenizer.vocab": round(config.tokenizer.vocab * factor)} for factor in (0.5, 2, 4)]
        named = {
            " ".join(f"{key.split('.')[-1]} {value:g}" for key, value in one.items() if key not in shape): one
            for one in found
            if None not in one.values()
        }
        wanted = [part for part in self.options["only"].split(",") if part]
        return {name: one for name, one in named.items() if not wanted or any(part in name for part in wanted)}

    def run(self) -> None:
        """Everything that is not finished yet, then the table."""
        text, plan = self.folder / "text.jsonl", self.folder / "plan"
        write_text(text, Path(self.options["data"]), self.cell)
        cores = self.lanes.queue[0]
        if not plan.exists():
            print(self.textmill(cores, "new", str(plan), "--text", str(text), "--minutes", f"{self.minutes:g}"))
        config = open_where(str(plan), []).config
        runs = {f"seed {seed}": {"train.seed": seed} for seed in range(1, int(self.options["seeds"]) + 1)}
        runs |= self.trials(config)
        for words in filter(None, map(str.split, self.options["also"].split(";"))):
            runs[" ".join(words)] = {key: json.loads(value) for key, value in (word.split("=", 1) for word in words)}
        same_steps: dict[str, Any] = {}
        if self.on_gpu:
            self.measure("seed 1", runs["seed 1"])
            same_steps = {"train.minutes": None, "train.steps": self.results["seed 1"]["steps"]}
        with ThreadPoolExecutor(len(runs)) as pool:
            list(pool.map(lambda name: self.measure(name, runs[name] | same_steps), runs))
        print(self.table())

    def table(self) -> str:
        """All runs, the best trial and the regret."""
        found = {name: one for name, one in self.results.items() if "failed" not in one}
        defaults = [one for name, one in found.items() if name.startswith("seed ")]
        best = min(found, key=lambda name: found[name]["valid"])
        lines = ["| run | valid | test | seconds | steps |", "|---|---|---|---|---|"]
        lines += [
            f"| {name} | {one['valid']:.4f} | {one['test']:.4f} | {one['seconds']} | {one['steps']:,} |"
            for name, one in found.items()
        ]
        if not defaults:
            return "\n".join(lines)
        regret = statistics.mean(one["test"] for one in defaults) - found[best]["test"]
        return "\n".join([*lines, f"best: {best}; regret {regret:+.4f}"])


def main() -> None:
    if len(sys.argv) < 3 or sys.argv[1] not in CELLS:
        sys.exit(f"{__doc__}\nCells: {', '.join(CELLS)}")
    Lanes(sys.argv[1], Path(sys.argv[2]), dict(word.split("=", 1) for word in sys.argv[3:])).run()


if __name__ == "__main__":
    main()
