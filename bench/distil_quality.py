"""What distillation gives on English: a 124M teacher, six of its blocks (82M) alone and distilled, on one GPU.

    python bench/distil_quality.py data=FOLDER out=FOLDER [teacher_seconds=100] [student_seconds=60] [limit=330]
                                   [layers=12] [blocks=0,2,4,7,9,11] [megabytes=0] [section.key=value ...]

FOLDER of `data` has en.jsonl.xz, gpt2_bpe (encoder.json, vocab.bpe) and wikitext2/test.txt. Documents that share an
n-gram with the test text are left out. All runs have the settings of `train.preset=pretrain-muon`; settings at the end
change them, such as train.distil.temperature=1 (`model.*`: those of nets that start from random weights).

1. teacher: as many steps as fit in `teacher_seconds`, which do not count the start and compiling.
2. distilled, from blocks: the student starts from the teacher's `blocks`, and trains for about `student_seconds`.
3. alone: the student from random weights without a teacher, the same steps, so the same tokens.
4. alone, from blocks: the same steps from the teacher's blocks, without a teacher.
5. alone, equal time: from random weights, as many steps as take the seconds of 2.
6. distilled, random: the steps of 2 from random weights.

After each run `textmill evaluate` measures the valid split and WikiText-2; a line of JSON is printed after each, a
table at the end. What would end after `limit` seconds is skipped, by name. With the same `out`, finished runs are not
trained again. What textmill prints is in `out`/log.txt. `megabytes` reads only the first part of the text.

On a CPU, without meaning: megabytes=2 layers=4 blocks=1,3 teacher_seconds=20 student_seconds=20 limit=300
model.shape.width=64 model.shape.heads=2 train.length=64 train.batch=4 engine.compile=false
"""

from __future__ import annotations

import gc
import json
import lzma
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import textmill
from textmill.where import open_where

OPTIONS: dict[str, Any] = {
    "data": "",
    "out": "",
    "teacher_seconds": 100.0,
    "student_seconds": 60.0,
    "limit": 330.0,
    "layers": 12,
    "blocks": "0,2,4,7,9,11",
    "megabytes": 0.0,
}
START_SECONDS = 25.0
"""Added to the seconds of steps for the start of a run and compiling."""
EVALUATION_SECONDS = 8.0
DISTILLED_RATE = 0.74
"""Tokens/s of distillation, of those of the teacher's own training (measured with bench/distil_gpu.py)."""
PARTS = 16
"""Files of text: `prepare` reads each in its own process."""
RECIPE = "gpt2-small"
COLUMNS = {
    "model": "model",
    "parameters": "parameters",
    "steps": "steps",
    "tokens": "tokens",
    "step_seconds": "s of steps",
    "valid_loss": "valid loss",
    "wikitext_word_perplexity": "WikiText-2 word ppl",
    "wikitext_token_perplexity": "token ppl",
}


@dataclass
class Trials:
    """All runs of this script, their results, and the time that is left."""

    options: dict[str, Any]
    settings: list[str]
    """Settings of the user, for every run."""
    started: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return Path(self.options["out"])

    def say(self, line: dict[str, Any]) -> None:
        """Print a line of JSON with the seconds since the start."""
        print(json.dumps({"at": round(time.perf_counter() - self.started, 1), **line}), flush=True)

    def fits(self, name: str, seconds: float) -> bool:
        """Whether a run of so many seconds ends before the limit; if not, say so."""
        left: float = self.options["limit"] - (time.perf_counter() - self.started)
        if seconds > left:
            self.say({"skipped": name, "needs_seconds": round(seconds), "left": round(left)})
        return seconds <= left

    def config(self, *settings: str) -> Any:
        """The recipe with these settings and the user's; a net that starts from a teacher has no settings of its own
        for its shape."""
        given = [one for one in self.settings if not (one.startswith("model.") and "model.init_from" in str(settings))]
        data, first = Path(self.options["data"]).resolve(), f"folder={self.out}"
        test = f"wikitext:{data / 'wikitext2' / 'test.txt'}"
        return open_where(
            RECIPE,
            [
                first,
                f"corpus.sources=[{self.out / 'texts'}]",
                f"corpus.decontaminate=[{test}]",
                f"tokenizer.use={data / 'gpt2_bpe'}",
                "train.epochs=null",
                "engine.compile=true",
                "train.save_every=1000000",
                "train.evaluate_every=1000000",
                "train.log_every=50",
                f"evaluate.tasks=[perplexity,{test}]",
                "evaluate.baselines=false",
                *settings,
                *given,
            ],
        ).config

    def run(self, name: str, *settings: str) -> dict[str, Any]:
        """Train and evaluate a model; return its row of the table."""
        folder, begun = self.out / name.replace(", ", "-").replace(" ", "-"), time.perf_counter()
        config = self.config(f"train.folder={folder}", *settings)
        with (self.out / "log.txt").open("a") as log, redirect_stdout(log):
            print(f"==== {name}", flush=True)
            textmill.train(config)
            forget()
            trained = time.perf_counter()
            measured = textmill.evaluate(config)
            forget()
        row = {"model": name, **read_metrics(folder), **read_evaluation(measured)}
        row |= {
            "wall_seconds": round(trained - begun, 1),
            "evaluation_seconds": round(time.perf_counter() - trained, 1),
        }
        self.rows.append(row)
        self.say(row)
        return row


def forget() -> None:
    """Free the memory of the run before, on the GPU too."""
    import torch  # not above: the processes of `prepare` import this file

    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def read_metrics(folder: Path) -> dict[str, Any]:
    """Parameters, steps, tokens, seconds of steps and tokens/s of a run."""
    from textmill.models import read_shape

    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    rate = median(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
    checkpoint = max(folder.glob("step-*"))
    progress = json.loads((checkpoint / "progress.json").read_text())
    found = {"parameters": read_shape(checkpoint).parameters, "steps": progress["step"], "tokens": progress["tokens"]}
    return {**found, "tokens_per_second": round(rate), "step_seconds": round(progress["tokens"] / rate, 1)}


def read_evaluation(measured: dict[str, Any]) -> dict[str, Any]:
    """Valid loss and perplexities of WikiText-2."""
    names = ("word_perplexity", "token_perplexity", "bits_per_byte")
    own = {f"wikitext_{name}": round(measured["wikitext"][name], 4) for name in names}
    return {
        "valid_loss": round(measured["perplexity"]["loss"], 4),
        "valid_tokens": measured["perplexity"]["card"]["tokens"],
        **own,
    }


def prepare(trials: Trials) -> None:
    """Write the text as several files, then clean and tokenize it."""
    texts, limit = trials.out / "texts", 1e6 * trials.options["megabytes"] or float("inf")
    if not texts.exists():
        part = trials.out / "texts.part"
        part.mkdir(parents=True, exist_ok=True)
        files, size = [(part / f"{number:02d}.jsonl").open("wb") for number in range(PARTS)], 0
        with lzma.open(Path(trials.options["data"]) / "en.jsonl.xz") as lines:
            for number, line in enumerate(lines):
                files[number % PARTS].write(line)
                size += len(line)
                if size >= limit:
                    break
        for file in files:
            file.close()
        part.rename(texts)
    with (trials.out / "log.txt").open("a") as log, redirect_stdout(log):
        for stage in (textmill.prepare, textmill.fit_tokenizer, textmill.tokenize):
            stage(trials.config())
    trials.say({"prepared": str(trials.out)})


def run_all(trials: Trials) -> None:
    """Train and measure what fits, in order of importance."""
    options, blocks = trials.options, trials.options["blocks"].split(",")
    start, seconds = START_SECONDS + EVALUATION_SECONDS, options["student_seconds"]
    minutes = (options["teacher_seconds"] + START_SECONDS) / 60
    if not trials.fits("teacher", options["teacher_seconds"] + start):
        return
    teacher = trials.run("teacher", f"train.minutes={minutes}", f"model.shape.layers={options['layers']}")
    steps = round(teacher["steps"] * seconds / teacher["step_seconds"] * DISTILLED_RATE)
    random = f"model.shape.layers={len(blocks)}"
    own = f"model.init_from={trials.out / 'teacher'}", f"model.init_layers=[{','.join(blocks)}]"
    distil = f"train.distil.teachers=[{trials.out / 'teacher'}]"
    if not trials.fits("distilled, from blocks", seconds + start):
        return
    distilled = trials.run("distilled, from blocks", f"train.steps={steps}", *own, distil)
    wall = distilled["wall_seconds"] + distilled["evaluation_seconds"]
    if not trials.fits("alone", 0.85 * wall):
        return
    alone = trials.run("alone", f"train.steps={steps}", random)
    alone_wall = alone["wall_seconds"] + alone["evaluation_seconds"]
    if trials.fits("alone, from blocks", alone_wall):
        trials.run("alone, from blocks", f"train.steps={steps}", *own)
    longer = distilled["step_seconds"] / alone["step_seconds"]
    if trials.fits("alone, equal time", alone_wall + (longer - 1) * alone["step_seconds"]):
        trials.run("alone, equal time", f"train.steps={round(longer * steps)}", random)
    if trials.fits("distilled, random", wall):
        trials.run("distilled, random", f"train.steps={steps}", random, distil)


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print all rows in Markdown."""
    print(f"| {' | '.join(COLUMNS.values())} |\n|{'---|' * len(COLUMNS)}")
    for row in rows:
        cells = (f"{row[key]:,}" if isinstance(row[key], int) else str(row[key]) for key in COLUMNS)
        print(f"| {' | '.join(cells)} |", flush=True)


def main(arguments: list[str]) -> None:
    """Prepare the text, do all runs that fit, print the table."""
    pairs = [argument.partition("=") for argument in arguments]
    options = {**OPTIONS, **{key: type(OPTIONS[key])(value) for key, _, value in pairs if key in OPTIONS}}
    if not options["data"] or not options["out"] or not all(equals for _, equals, _ in pairs):
        raise SystemExit(__doc__)
    options["out"] = str(Path(options["out"]).resolve())
    Path(options["out"]).mkdir(parents=True, exist_ok=True)
    trials = Trials(options, [argument for argument in arguments if argument.partition("=")[0] not in OPTIONS])
    prepare(trials)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    trials.say({"device": device, "torch": torch.__version__, "textmill": textmill.__version__, **options})
    try:
        run_all(trials)
    finally:
        print_table(trials.rows)


if __name__ == "__main__":
    main(sys.argv[1:])
