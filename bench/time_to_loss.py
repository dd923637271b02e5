"""Seconds and tokens of training until a loss on real text: a 124M net, a corpus in JSON lines, GPT-2's vocabulary.

    python bench/time_to_loss.py CORPUS.jsonl.xz BPE_FOLDER [total=SECONDS] [seconds=60] [optimizer=muon]
                                 [learning_rate=RATE] [batch=SAMPLES] ... [then ...]

Documents whose line number modulo 100 is 7 are the validation split, the others the training split, each followed by an
end-of-text token. The validation loss is that of the first 524,288 tokens, in windows of 1,024. The clock counts
training steps only; the schedule is a cosine over the given seconds with 5% warm-up, unless `schedule` and `warmup`
are set. `ramp=16:0.3` takes 16 samples a step in the first 30% of the seconds.

`then` separates the settings of several runs; each run starts with the settings of the one before.
`optimizer=adamw` and `optimizer=muon` set the learning rate and batch of their preset; later arguments override these.
`seconds=60,170,540` means three runs. `total` limits the time of all runs with compiling and evaluating: a run that
would not fit is skipped, with a message.

After each run its curve is printed: seconds, tokens and validation loss at fixed fractions of its length, or at those
of `evaluations=0.5,1`. At the end, all curves are compared at equal tokens and at equal seconds. `family=llama` trains
that family. `shape` is layers x heads x width, and `set=kv_heads:4,qk_norm:true` changes other numbers of
`model.shape`; the next run keeps both unless it sets them (`set=` for none). `valid` (tokens), `length` and `compile`
make it small enough for a CPU.

Trials of the Llama family that have not run yet (bench/LOG.md has those that have), 25 s each, then 170 s:

    family=llama seconds=25 evaluations=0.4,0.7,0.85,0.95,1 shape=7x6x768 embedding_rate_factor=8 precision=fp8
    set=untied:true,inner:1856,qk_norm:true then precision=auto
    then shape=5x6x768 set=untied:true,kv_heads:2,qk_norm:true precision=auto
    then shape=7x6x768 set=untied:true,inner:1856 embedding_rate_factor=3 weight_decay=0.25 seconds=170 precision=fp8
    then shape=10x6x768
"""

from __future__ import annotations

import gc
import json
import lzma
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from textmill.config import ModelConfig, MuonConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import Engine, EvalSums, open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch
from textmill.training.run_length import lr_at

END = 50256
TICKS = 100_000
"""Steps of the schedule; the clock is scaled to these."""
EPOCHS = 50
"""Epochs with an order of their own; then the first one begins again."""


def preset_settings(optimizer: str) -> dict[str, Any]:
    """The learning rates and the batch of an optimizer's preset."""
    preset = TrainConfig(preset=f"pretrain-{optimizer}")  # type: ignore[arg-type]
    return {
        "learning_rate": preset.learning_rate,
        "adamw_rate_factor": preset.muon.adamw_rate_factor,
        "momentum": preset.muon.momentum,
        "batch": preset.batch,
    }


SETTINGS: dict[str, Any] = {
    "seconds": "60",
    "target": 4.416,
    "optimizer": "muon",
    **preset_settings("muon"),
    "weight_decay": 0.1,
    "beta2": 0.95,
    "embedding_rate_factor": 1.0,
    "family": "gpt2",
    "size": "small",
    "shape": "",
    "set": "",
    "vocab": END + 1,
    "length": 1024,
    "valid": 524288,
    "precision": "auto",
    "compile": 1,
    "seed": 1,
    "schedule": "cosine",
    "warmup": 0.05,
    "ramp": "",
    "evaluations": "0.1,0.25,0.4,0.55,0.7,0.75,0.8,0.85,0.9,0.95,1",
}


@dataclass
class Curve:
    """Seconds, tokens and validation loss at each evaluation of a run."""

    name: str
    compiling: float
    """Seconds of the first steps, before the clock started."""
    points: list[tuple[float, int, float]] = field(default_factory=list)

    def at(self, amount: float, axis: int) -> float | None:
        """The loss after so many seconds (axis 0) or tokens (axis 1), linear between two evaluations."""
        for before, after in zip(self.points, self.points[1:], strict=False):
            if before[axis] <= amount <= after[axis]:
                part = (amount - before[axis]) / max(1e-9, after[axis] - before[axis])
                return before[2] + (after[2] - before[2]) * part
        return None


def read_tokens(corpus: Path, folder: Path) -> tuple[Any, Any]:
    """Read and tokenize the corpus; return training and validation tokens."""
    bpe = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    splits: list[list[Any]] = [[], []]
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for number, encoded in enumerate(bpe.encode_batch_fast(texts)):
        splits[number % 100 == 7].append(np.array([*encoded.ids, END], np.uint16))
    train, valid = (np.concatenate(split) for split in splits)
    return train, valid


def shuffle_windows(settings: dict[str, Any], tokens: Any) -> Any:
    """Return where the training windows start, in their order: each epoch has another order and other borders."""
    dice, length, epochs = np.random.default_rng(settings["seed"]), settings["length"], []
    for epoch in range(EPOCHS):
        order = dice.permutation((len(tokens) - 1) // length - bool(epoch))
        epochs.append(order * length + (dice.integers(length) if epoch else 0))
    return np.concatenate(epochs)


def batch_at(tokens: Any, starts: Any, first: int, settings: dict[str, Any], size: int) -> Batch:
    """Return `size` windows, starting with number `first`."""
    positions = np.arange(first, first + size)
    chosen = starts[positions % len(starts)]
    ids = tokens[chosen[:, None] + np.arange(settings["length"] + 1)].astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], positions)


def evaluate(engine: Engine, valid: Any, settings: dict[str, Any]) -> float:
    """Return the mean loss of the validation windows."""
    windows, sums = settings["valid"] // settings["length"], EvalSums(0.0, 0, 0)
    size, starts = min(64, windows), np.arange(windows) * settings["length"]
    for step in range(windows // size):
        sums = sums + engine.eval_step(batch_at(valid, starts, step * size, settings, size))
    return sums.loss / sums.loss_tokens


def open_initial_engine(settings: dict[str, Any]) -> tuple[Engine, TrainConfig]:
    """Open an engine with initial weights."""
    length = settings["length"]
    train = TrainConfig(
        batch=settings["batch"],
        length=length,
        steps=TICKS,
        learning_rate=settings["learning_rate"],
        warmup=settings["warmup"],
        schedule=settings["schedule"],
        optimizer=settings["optimizer"],
        muon=MuonConfig(adamw_rate_factor=settings["adamw_rate_factor"], momentum=settings["momentum"]),
        weight_decay=settings["weight_decay"],
        betas=[0.9, settings["beta2"]],
        embedding_rate_factor=settings["embedding_rate_factor"],
    )
    engine = TorchEngine(
        compile=bool(settings["compile"]), micro_batch=min(64, settings["batch"]), precision=settings["precision"]
    )
    parts = [part.split(":") for part in settings["set"].split(",") if part]
    numbers: dict[str, Any] = {name: yaml.safe_load(value) for name, value in parts}
    if settings["shape"]:
        numbers |= zip(("layers", "heads", "width"), map(int, settings["shape"].split("x")), strict=True)
    model = ModelConfig(family=settings["family"], size=settings["size"], shape=ShapeConfig(**numbers))
    config = RunConfig(model=model, train=train, engine=engine)
    family = open_family(settings["family"])
    net = family.shape_of(config.model, vocab=settings["vocab"], eos_id=settings["vocab"] - 1, length=length)
    opened = open_engine(config.engine, config.train, net, config.model.lora)
    opened.load(initial_weights(net, settings["seed"]), [], 0, "start")
    return opened, train


def batch_size_at(done: float, settings: dict[str, Any]) -> int:
    """Return the samples of a step after this fraction of the run."""
    small, _, until = settings["ramp"].partition(":")
    return int(small) if small and done < float(until) else int(settings["batch"])


def describe(settings: dict[str, Any], seconds: float, parameters: int) -> str:
    """Return the settings that differ from the defaults."""
    changed = [f"{key}={value}" for key, value in settings.items() if value != SETTINGS[key] and key != "seconds"]
    return f"{seconds:g} s, {parameters / 1e6:.0f}M, {' '.join(changed) or 'defaults'}"


def run(settings: dict[str, Any], seconds: float, train: Any, valid: Any) -> Curve:
    """Train for some seconds and measure the validation loss in between; print the curve and when it met the target."""
    starts = shuffle_windows(settings, train)

    def first_batch(size: int) -> Batch:
        return batch_at(train, starts, 0, settings, size)

    started = time.perf_counter()
    engine, config = open_initial_engine(settings)
    sizes = dict.fromkeys([settings["batch"], batch_size_at(0.0, settings)])
    for step, size in enumerate([*sizes] * 4):  # these steps compile; then a new engine is opened and the clock starts
        float(engine.train_step(first_batch(size), step, 0.0).loss)
    del engine
    gc.collect()
    compiling = time.perf_counter() - started
    engine, config = open_initial_engine(settings)
    for size in sizes:
        float(engine.train_step(first_batch(size), 0, 0.0).loss)
    curve = Curve(describe(settings, seconds, engine.describe()["parameters"]), compiling)
    spent, step, samples = 0.0, 0, 0
    for fraction in map(float, settings["evaluations"].split(",")):
        started, before = time.perf_counter(), spent
        while spent < fraction * seconds:
            rate = lr_at(int(spent / seconds * TICKS), config)
            size = batch_size_at(spent / seconds, settings)
            batch = batch_at(train, starts, samples, settings, size)
            last = engine.train_step(batch, step, rate)
            step, samples, spent = step + 1, samples + size, before + time.perf_counter() - started
        float(last.loss)
        spent = before + time.perf_counter() - started
        curve.points.append((spent, samples * settings["length"], evaluate(engine, valid, settings)))
    engine.close()
    print(f"{curve.name} | {curve.points[-1][1] / spent:,.0f} tokens/s, {compiling:.0f} s before the clock", flush=True)
    print("  " + "; ".join(f"{time_:.1f} s {tokens / 1e6:.2f}M {loss:.3f}" for time_, tokens, loss in curve.points))
    met = next((time_ for time_, _, loss in curve.points if loss <= settings["target"]), None)
    print(f"  {settings['target']} met at {met:.1f} s" if met else f"  {settings['target']} not met", flush=True)
    return curve


def print_compared(curves: list[Curve], axis: int, unit: str, divisor: float, count: int = 6) -> None:
    """Print the losses of all curves at amounts of seconds (axis 0) or tokens (axis 1) that each of them reached."""
    least = min(curve.points[-1][axis] for curve in curves)
    amounts = [least * number / count for number in range(1, count + 1)]
    print(f"at equal {unit}: " + " | ".join(f"{amount / divisor:.2f}" for amount in amounts))
    for curve in curves:
        losses = [curve.at(amount, axis) for amount in amounts]
        print(f"  {curve.name}: " + " | ".join("-" if loss is None else f"{loss:.3f}" for loss in losses), flush=True)


def read_runs(arguments: list[str]) -> list[tuple[dict[str, Any], float]]:
    """Return the settings and the seconds of each run."""
    settings, runs = dict(SETTINGS), []
    for argument in [*arguments, "then"]:
        if argument == "then":
            runs += [(dict(settings), float(seconds)) for seconds in settings["seconds"].split(",")]
            continue
        key, _, value = argument.partition("=")
        settings[key] = type(SETTINGS[key])(value)
        if key == "optimizer":
            settings.update(preset_settings(value))
    return runs


def main(arguments: list[str]) -> None:
    """Do every run that fits into the time."""
    started = time.perf_counter()
    totals = [float(argument.partition("=")[2]) for argument in arguments if argument.startswith("total=")]
    runs = read_runs([argument for argument in arguments[2:] if not argument.startswith("total=")])
    train, valid = read_tokens(Path(arguments[0]), Path(arguments[1]))
    print(f"{len(train):,} tokens of training, {len(valid):,} of validation", flush=True)
    curves: list[Curve] = []
    evaluating, compiling, compiled = 0.0, 0.0, set()
    for settings, seconds in runs:
        keys = "optimizer", "batch", "ramp", "family", "size", "shape", "set", "length"
        shape = tuple(settings[key] for key in keys)
        # Without compiling, a start takes no longer than the evaluations.
        overhead = evaluating + (evaluating if shape in compiled else compiling)
        left = totals[0] - (time.perf_counter() - started) if totals else float("inf")
        if seconds + overhead > left:
            print(
                f"skipped: {settings['optimizer']} for {seconds:g} s; {left:.0f} s are left, "
                f"and it needs {overhead:.0f} s in addition to training"
            )
            continue
        start = time.perf_counter()
        curves.append(run(settings, seconds, train, valid))
        evaluating = max(evaluating, time.perf_counter() - start - seconds - curves[-1].compiling)
        compiling = max(compiling, curves[-1].compiling)
        compiled.add(shape)
        gc.collect()
    if len(curves) > 1:
        print_compared(curves, 1, "millions of tokens", 1e6)
        print_compared(curves, 0, "seconds", 1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
