"""A BERT in minutes on real text: masked accuracy, loss curve, minimal pairs, and one minute of finetuning.

    python bench/bert_run.py data=FOLDER out=FOLDER [minutes=7.5] [tune_minutes=1] [limit=580] [shape=LAYERSxWIDTH]
                             [documents=N] [pairs=400] [examples=2000] [set=train.batch=256,...]

data: the folder with en.jsonl.xz, lines of {"text": ..., "source": ...}. `textmill new --family bert` plans the run for
`minutes`, which count the entire `textmill run`; `shape` takes that net instead, with 32,000 tokens, 256 x 128 tokens a
step and the rates of `train.preset=auto`. `set` changes settings of the run. documents: only the first N of the text.

- Minimal pairs are made of sentences of the test split (bench/minimal_pairs.py has the rules).
- Finetuning: which of the sources is a passage of 200 to 500 characters from? Trained on documents of the valid split,
  measured on those of the test split, both held out from pretraining; `examples` passages of each source at most, 30 of
  a document. The same net with random weights is trained at the same time, so that both share the device; it gets five
  times the learning rate, which a net without pretraining needs.

No stage starts after `limit` seconds if it would not end in time, and one that does not end is stopped. What is
finished is kept in OUT/results.json; the same command continues, after a kill too.
"""

from __future__ import annotations

import json
import lzma
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import curves
import yaml
from minimal_pairs import accuracy_of_counts, build_pairs, write_pairs
from source_passages import passages, tune_config, write_passages

from textmill.checkpoints.folders import rank_checkpoints
from textmill.corpus.shards import list_shards, read_documents
from textmill.evaluation.tasks.perplexity import count
from textmill.storage.stages import MANIFEST
from textmill.tokens.store import open_store
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

STARTED = time.monotonic()
FILES = 32
"""Files that the text is divided into: `prepare` reads them in parallel."""
PER_DOCUMENT = 30
"""Passages of a document, at most."""
PROMPT = "The capital of France is [MASK]."
Numbers = dict[str, Any]


class Stopped(Exception):
    """A stage has no time, or has not ended in time."""


class Bench:
    """All stages in one folder."""

    def __init__(self, options: dict[str, str]) -> None:
        self.options, self.data, self.out = options, Path(options["data"]), Path(options["out"]).absolute()
        self.minutes, self.tune_minutes = float(options.get("minutes", 7.5)), float(options.get("tune_minutes", 1))
        self.limit = float(options.get("limit", 580))
        self.out.mkdir(parents=True, exist_ok=True)
        self.root, self.path = self.out / "bert", self.out / "results.json"
        self.results: Numbers = json.loads(self.path.read_text()) if self.path.is_file() else {}

    @property
    def left(self) -> float:
        return self.limit - (time.monotonic() - STARTED)

    def once(self, key: str, seconds: float, measure: Callable[[], Numbers]) -> Numbers:
        """A result, measured unless an earlier call has finished it; it needs about so many seconds."""
        if key not in self.results:
            if self.left < seconds:
                raise Stopped(f"{key}: needs about {seconds:.0f} s, {self.left:.0f} s are left")
            began = time.monotonic()
            found = measure()
            self.results[key] = {"seconds": round(time.monotonic() - began, 1), **found}
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(self.results, indent=1))
            part.replace(self.path)
            print(json.dumps({key: self.results[key]}, ensure_ascii=False), flush=True)
        result: Numbers = self.results[key]
        return result

    def start(self, *words: str) -> tuple[subprocess.Popen[str], Path]:
        """Start a command whose output goes to a log of its own."""
        log = self.out / f"log-{len(list(self.out.glob('log-*'))):02d}-{words[0]}"
        print(f"{time.monotonic() - STARTED:.0f} s: textmill {' '.join(words)}", file=sys.stderr, flush=True)
        with log.open("w") as stream:
            command = [sys.executable, "-m", "textmill", *words]
            return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, text=True), log

    def wait(self, started: tuple[subprocess.Popen[str], Path]) -> str:
        """The output of a command, which must succeed in time."""
        process, log = started
        try:
            code = process.wait(max(1.0, self.left))
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
            raise Stopped(f"{log.name}: did not end in time; {log.read_text()[-300:]}") from None
        if code:
            sys.exit(f"{log.name}: exit code {code}: {log.read_text()[-3000:]}")
        return log.read_text()

    def write_text(self) -> Numbers:
        """Divide the text into files, whole documents each."""
        folder, part = self.out / "text", self.out / "text.part"
        part.mkdir(exist_ok=True)
        documents, size = 0, 0
        streams = [(part / f"{number:02d}.jsonl").open("w", encoding="utf-8") for number in range(FILES)]
        with lzma.open(self.data / "en.jsonl.xz", "rt", encoding="utf-8") as lines:
            for line in islice(lines, int(self.options.get("documents", 10**9))):
                streams[documents % FILES].write(line)
                documents, size = documents + 1, size + len(line)
        for stream in streams:
            stream.close()
        part.rename(folder)
        return {"documents": documents, "characters": size}

    def plan(self) -> Numbers:
        """Write the settings of the run."""
        if "shape" in self.options:
            layers, width = map(int, self.options["shape"].split("x"))
            self.root.mkdir(exist_ok=True)
            config = run_config(self.out / "text", layers, width, self.minutes)
            (self.root / "textmill.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        elif not (self.root / "textmill.yaml").is_file():
            text, minutes = str(self.out / "text"), f"{self.minutes:g}"
            self.wait(self.start("new", str(self.root), "--text", text, "--family", "bert", "--minutes", minutes))
        settings = yaml.safe_load((self.root / "textmill.yaml").read_text(encoding="utf-8"))
        return {"settings": {name: settings[name] for name in ("tokenizer", "model", "train")}}

    def pretrain(self) -> Numbers:
        """The entire `textmill run`, and the numbers of its curve."""
        changed = [word for word in self.options.get("set", "").split(",") if word]
        words = ["run", str(self.root), "corpus.keep_fields=[source]", f"sample.prompt={PROMPT}", *changed]
        output = self.wait(self.start(*words))
        run = self.root / "run"
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        valid = [line for line in lines if line.get("valid_loss") is not None]
        names = ("step", "valid_loss", "valid_accuracy", "valid_pair_accuracy")
        curve = [{name: line[name] for name in names if name in line} for line in valid]
        best = min(curve, key=lambda entry: entry["valid_loss"])
        rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
        curves.main([str(self.out / "curve.svg"), f"BERT, {self.minutes:g} minutes={run}"])
        vocab = json.loads((self.root / "tokens" / MANIFEST).read_text()).get("vocab")
        return {
            "curve": curve,
            "best": best,
            "last": curve[-1],
            "vocab": vocab,
            "net": net_of(rank_checkpoints(run, None)[0]),
            "tokens_per_second": rates[len(rates) // 2] if rates else None,
            "filled": output.partition("[6/6]")[2].splitlines()[1:8],
        }

    def compare_pairs(self) -> Numbers:
        """Accuracy of minimal pairs, next to models that count tokens."""
        limit = int(self.options.get("pairs", 400))
        pairs = build_pairs((text for text, _ in self.held_out("test")), limit)
        paths = write_pairs(self.out / "pairs", pairs)
        tasks = ",".join(f"pairs:{path}" for path in paths.values())
        running = self.start("evaluate", str(self.root), f"evaluate.tasks=[{tasks}]", "--json")
        tokenizer = open_tokenizer(self.root / "tokenizer")
        counts = count(open_store(self.root / "tokens" / "train"), vocab=tokenizer.vocab, first=tokenizer.sep_id)
        by_counts = {
            name: accuracy_of_counts(counts, tokenizer.encode, pairs[name], tokenizer.sep_id) for name in paths
        }
        measured = json.loads(self.wait(running).splitlines()[-1])
        found: Numbers = {}
        for name, entry in zip(paths, pair_entries(measured), strict=True):
            found[name] = {
                "pairs": len(pairs[name]),
                "bert": entry["acc"],
                **by_counts[name],
                "example": pairs[name][0],
            }
        return found

    def held_out(self, split: Any) -> Iterator[tuple[str, str]]:
        """Text and source of each document of a split; documents of different sources alternate as in the file."""
        for shard in list_shards(self.root / "corpus", split):
            for document in read_documents(shard):
                yield document.text, json.loads(document.meta or "{}")["source"]

    def passages_of(self, split: str, most: int) -> dict[str, list[str]]:
        """Passages of a split, by their source."""
        found: dict[str, list[str]] = defaultdict(list)
        for text, source in self.held_out(split):
            found[source] += islice(passages(text), min(PER_DOCUMENT, most - len(found[source])))
        return {source: texts for source, texts in found.items() if texts}

    def tune(self) -> Numbers:
        """Finetune the pretrained net and one with random weights at the same time."""
        most, best = int(self.options.get("examples", 2000)), rank_checkpoints(self.root / "run", None)[0]
        folder = self.out / "tune"
        folder.mkdir(exist_ok=True)
        trained, tested = self.passages_of("valid", most), self.passages_of("test", most // 4)
        tested = {source: texts for source, texts in tested.items() if source in trained}
        write_passages(folder / "train.csv", trained)
        write_passages(folder / "valid.csv", tested)
        length = min(128, net_of(best)["positions"])
        nets = {"pretrained": {"init_from": str(best)}, "random": {"shape": str(best / "config.json")}}
        running = {}
        for name, net in nets.items():
            config = tune_config(folder, name, self.root / "tokenizer", net, length, self.tune_minutes)
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
            running[name] = self.start("run", str(folder / f"{name}.yaml"))
        try:
            for started in running.values():
                self.wait(started)
        finally:
            for process, _ in running.values():
                process.kill()  # of a run that has ended, this does nothing
        counts = [{source: len(texts) for source, texts in some.items()} for some in (trained, tested)]
        majority = max(trained, key=lambda source: len(trained[source]))
        found: Numbers = {"majority": counts[1].get(majority, 0) / sum(counts[1].values())}
        for name in nets:
            summary = json.loads((folder / name / "run" / "summary.json").read_text())["measured"]
            metrics = summary["sequence-classification"]
            found[name] = {key: value for key, value in metrics.items() if isinstance(value, float)}
        return {"trained_on": counts[0], "measured_on": counts[1], **found}

    def run(self) -> None:
        """Everything that is not finished yet and fits in the time, then the table."""
        try:
            self.once("text", 5, self.write_text)
            self.once("plan", 10, self.plan)
            self.once("pretrain", min(60.0, 60 * self.minutes), self.pretrain)
            self.once("pairs", 15, self.compare_pairs)
            self.once("tune", 60 * self.tune_minutes, self.tune)
        except Stopped as reason:
            print(f"stopped: {reason}; the same command continues", flush=True)
        print(f"{time.monotonic() - STARTED:.0f} s\n\n" + "\n".join(report(self.results)))


def run_config(text: Path, layers: int, width: int, minutes: float) -> Numbers:
    """The settings of a run with a net of this shape."""
    return {
        "corpus": {"sources": [str(text)], "sentences": "split", "split": "90,5,5"},
        "tokenizer": {"kind": "wordpiece", "vocab": 32_000, "lowercase": True},
        "tokens": {"level": "sentence", "append_end": False},
        "model": {"family": "bert", "shape": {"layers": layers, "width": width, "heads": max(1, width // 64)}},
        "train": {
            "layout": "masked",
            "masked": {"pairs": "next"},
            "length": 128,
            "batch": 256,
            "minutes": minutes,
            "preset": "auto",
            "evaluate_every": 750,
            "evaluate_batches": 40,
            "save_every": 3000,
        },
    }


def net_of(folder: Path) -> Numbers:
    """The numbers of a checkpoint's config.json that describe its size."""
    config = json.loads((folder / "config.json").read_text())
    names = {"layers": "num_hidden_layers", "width": "hidden_size", "positions": "max_position_embeddings"}
    return {name: config[key] for name, key in names.items()}


def pair_entries(measured: Numbers) -> list[Numbers]:
    """The results of the tasks, in their order."""
    return [entry for entry in measured.values() if isinstance(entry, dict) and "acc" in entry]


def report(results: Numbers) -> list[str]:
    """The tables for docs/results.md."""
    lines: list[str] = []
    if found := results.get("pretrain"):
        lines += ["| step | valid loss | masked accuracy | pair accuracy |", "|---|---|---|---|"]
        for entry in found["curve"]:
            pair = f"{entry['valid_pair_accuracy']:.1%}" if "valid_pair_accuracy" in entry else "-"
            lines.append(f"| {entry['step']:,} | {entry['valid_loss']:.3f} | {entry['valid_accuracy']:.1%} | {pair} |")
    if found := results.get("pairs"):
        lines += ["", "| minimal pairs | number | BERT | unigram | bigram |", "|---|---|---|---|---|"]
        for name, entry in found.items():
            if isinstance(entry, dict):
                rates = " | ".join(f"{entry[model]:.1%}" for model in ("bert", "unigram", "bigram"))
                lines.append(f"| {name} | {entry['pairs']} | {rates} |")
    if found := results.get("tune"):
        lines += ["", "| finetuning | accuracy | macro F1 |", "|---|---|---|"]
        for name in ("pretrained", "random"):
            lines.append(f"| {name} | {found[name]['accuracy']:.1%} | {found[name]['macro_f1']:.3f} |")
        lines.append(f"| majority | {found['majority']:.1%} | - |")
    return lines


if __name__ == "__main__":
    Bench(dict(word.split("=", 1) for word in sys.argv[1:])).run()
