"""Seconds and tokens of training that a loss on real text takes: GPT-2 124M, a corpus in JSON lines, GPT-2's vocabulary.

    python bench/time_to_loss.py CORPUS.jsonl.xz BPE_FOLDER [total=SECONDS] [seconds=60] [optimizer=muon] [rate=RATE] [batch=SAMPLES] ...

Documents whose line number leaves 7 modulo 100 are validation, the rest training, an end-of-text after each. The loss is that of the first
524,288 tokens of validation, in windows of 1,024. The clock counts training steps only; the schedule is a cosine over the seconds given
with 5% of warm-up. A word `then` parts the settings of several runs, each of which begins with those before it; `optimizer=adamw` and
`optimizer=muon` bring the rate and batch of their preset unless these are said after them. `seconds=60,170,540` is a run for each.
`total` is the time that all of it may take with compiling and evaluating: a run that would not fit is left out, and that is said.

After a run its curve: seconds, tokens, validation loss, at fixed shares of its length. At the end, where runs were longer than one look,
all curves at equal tokens. `valid` (tokens), `length`, `shape` (layers x heads x width) and `compile` make it small enough for a CPU.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from textmill.config import ModelConfig, MuonConfig, RunConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.engines import Engine, Sums, open_engine
from textmill.models import initial_weights, open_family
from textmill.schedules import lr_at
from textmill.tokens.batches.batch import Batch

END = 50256
TICKS = 100_000
"""The schedule's steps: the clock is read into so many."""
LOOKS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0)
"""Shares of a run after which the validation loss is looked at."""


def preset_of(optimizer: str) -> dict[str, Any]:
    """What an optimizer's preset says of rates and batch."""
    preset = TrainConfig(preset=f"pretrain-{optimizer}")  # type: ignore[arg-type]
    return {
        "rate": preset.learning_rate,
        "rest": preset.muon.adamw_rate_factor,
        "momentum": preset.muon.momentum,
        "batch": preset.batch,
    }


SETTINGS: dict[str, Any] = {
    "seconds": "60", "target": 4.416, "optimizer": "muon", **preset_of("muon"), "decay": 0.1, "beta2": 0.95,
    "size": "small", "shape": "", "length": 1024, "valid": 524288, "precision": "auto", "compile": 1, "seed": 1,
}  # fmt: skip


@dataclass
class Curve:
    """What one run was seen to do: seconds, tokens and validation loss at each look."""

    name: str
    compiling: float
    """Seconds before the run that the first steps of its shape took."""
    points: list[tuple[float, int, float]] = field(default_factory=list)

    def at(self, tokens: int) -> float | None:
        """The loss after so many tokens, in a straight line between two looks."""
        for (_, low, high_loss), (_, high, low_loss) in zip(self.points, self.points[1:], strict=False):
            if low <= tokens <= high:
                return high_loss + (low_loss - high_loss) * (tokens - low) / max(1, high - low)
        return None


def tokens_of(corpus: Path, folder: Path) -> tuple[Any, Any]:
    """Training and validation tokens."""
    bpe = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    sides: list[list[Any]] = [[], []]
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    for number, encoded in enumerate(bpe.encode_batch_fast(texts)):
        sides[number % 100 == 7].append(np.array([*encoded.ids, END], np.uint16))
    train, valid = (np.concatenate(side) for side in sides)
    return train, valid


def order_of(settings: dict[str, Any], tokens: Any) -> Any:
    """The order of the training windows."""
    return np.random.default_rng(settings["seed"]).permutation((len(tokens) - 1) // settings["length"])


def batch_at(tokens: Any, order: Any, step: int, settings: dict[str, Any], size: int | None = None) -> Batch:
    """Windows in a shuffled order, over and over."""
    length, size = settings["length"], size or settings["batch"]
    places = np.arange(step * size, (step + 1) * size)
    starts = order[places % len(order)].astype(np.int64) * length
    ids = tokens[starts[:, None] + np.arange(length + 1)].astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], places)


def loss_of(engine: Engine, valid: Any, settings: dict[str, Any]) -> float:
    """The mean loss of the validation windows."""
    windows, sums = settings["valid"] // settings["length"], Sums(0.0, 0, 0)
    size = min(64, windows)
    for step in range(windows // size):
        sums = sums + engine.eval_step(batch_at(valid, np.arange(windows), step, settings, size))
    return sums.loss / sums.asked


def fresh(settings: dict[str, Any]) -> tuple[Engine, TrainConfig]:
    """An engine with first weights."""
    length = settings["length"]
    train = TrainConfig(
        batch=settings["batch"], length=length, steps=TICKS, learning_rate=settings["rate"], warmup=0.05, optimizer=settings["optimizer"],
        muon=MuonConfig(adamw_rate_factor=settings["rest"], momentum=settings["momentum"]),
        weight_decay=settings["decay"], betas=[0.9, settings["beta2"]],
    )  # fmt: skip
    engine = TorchEngine(
        compile=bool(settings["compile"]), micro_batch=min(64, settings["batch"]), precision=settings["precision"]
    )
    shape = ShapeConfig()
    if settings["shape"]:
        layers, heads, width = map(int, settings["shape"].split("x"))
        shape = ShapeConfig(layers=layers, heads=heads, width=width)
    config = RunConfig(model=ModelConfig(size=settings["size"], shape=shape), train=train, engine=engine)
    family = open_family("gpt2")
    net = family.shape_of(config.model, vocab=END + 1, end=END, length=length)
    opened = open_engine(config, net)
    opened.load(initial_weights(net, settings["seed"]), [], 0, "start")
    return opened, train


def run(settings: dict[str, Any], seconds: float, train: Any, valid: Any) -> Curve:
    """Train by the clock and look at the validation loss on the way; print the curve and when the target was met."""
    order, batch = order_of(settings, train), settings["batch"]
    began = time.perf_counter()
    engine, config = fresh(settings)
    for step in range(4):  # compiles; these steps' engine is dropped, and the clock starts with the next one's
        float(engine.train_step(batch_at(train, order, step, settings), step, 0.0).loss)
    del engine
    gc.collect()
    compiling = time.perf_counter() - began
    engine, config = fresh(settings)
    float(engine.train_step(batch_at(train, order, 0, settings), 0, 0.0).loss)
    chosen = " ".join(
        f"{key}={settings[key]}" for key in ("optimizer", "rate", "rest", "momentum", "batch", "decay", "beta2", "seed")
    )
    curve, spent, step = Curve(f"{chosen} seconds={seconds:g}", compiling), 0.0, 0
    for share in LOOKS:
        begun, start = time.perf_counter(), spent
        while spent < share * seconds:
            rate = lr_at(int(spent / seconds * TICKS), config)
            last = engine.train_step(batch_at(train, order, step, settings), step, rate)
            step, spent = step + 1, start + time.perf_counter() - begun
        float(last.loss)
        spent = start + time.perf_counter() - begun
        curve.points.append((spent, step * batch * settings["length"], loss_of(engine, valid, settings)))
    engine.close()
    print(f"{curve.name} | {curve.points[-1][1] / spent:,.0f} tokens/s", flush=True)
    print("  " + "; ".join(f"{time_:.1f} s {tokens / 1e6:.2f}M {loss:.3f}" for time_, tokens, loss in curve.points))
    met = next((time_ for time_, _, loss in curve.points if loss <= settings["target"]), None)
    print(f"  {settings['target']} met at {met:.1f} s" if met else f"  {settings['target']} not met", flush=True)
    return curve


def at_equal_tokens(curves: list[Curve], count: int = 6) -> None:
    """All curves side by side, at tokens that each of them has seen."""
    least = min(curve.points[-1][1] for curve in curves)
    marks = [least * number // count for number in range(1, count + 1)]
    print("at equal tokens: " + " | ".join(f"{mark / 1e6:.2f}M" for mark in marks))
    for curve in curves:
        losses = [curve.at(mark) for mark in marks]
        print(f"  {curve.name}: " + " | ".join("-" if loss is None else f"{loss:.3f}" for loss in losses), flush=True)


def runs_of(words: list[str]) -> list[tuple[dict[str, Any], float]]:
    """The settings of each run that is asked for, and its seconds."""
    settings, asked = dict(SETTINGS), []
    for word in [*words, "then"]:
        if word == "then":
            asked += [(dict(settings), float(seconds)) for seconds in settings["seconds"].split(",")]
            continue
        key, _, value = word.partition("=")
        settings[key] = type(SETTINGS[key])(value)
        if key == "optimizer":
            settings.update(preset_of(value))
    return asked


def main(words: list[str]) -> None:
    """Every run that the words ask for and the time allows."""
    begun = time.perf_counter()
    totals = [float(word.partition("=")[2]) for word in words if word.startswith("total=")]
    asked = runs_of([word for word in words[2:] if not word.startswith("total=")])
    train, valid = tokens_of(Path(words[0]), Path(words[1]))
    print(f"{len(train):,} tokens of training, {len(valid):,} of validation", flush=True)
    curves: list[Curve] = []
    looking, compiling, compiled = 0.0, 0.0, set()
    for settings, seconds in asked:
        shape = tuple(settings[key] for key in ("optimizer", "batch", "size", "shape", "length"))
        beside = looking + (
            looking if shape in compiled else compiling
        )  # a start without compiling is no longer than what goes beside
        left = totals[0] - (time.perf_counter() - begun) if totals else float("inf")
        if seconds + beside > left:
            print(
                f"left out: {settings['optimizer']} for {seconds:g} s; {left:.0f} s are left, and {beside:.0f} go beside the training"
            )
            continue
        start = time.perf_counter()
        curves.append(run(settings, seconds, train, valid))
        looking = max(looking, time.perf_counter() - start - seconds - curves[-1].compiling)
        compiling = max(compiling, curves[-1].compiling)
        compiled.add(shape)
        gc.collect()
    if len(curves) > 1:
        at_equal_tokens(curves)


if __name__ == "__main__":
    main(sys.argv[1:])
