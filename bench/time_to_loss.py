"""Seconds of training that a loss on real text takes: GPT-2 124M, a corpus in JSON lines, GPT-2's vocabulary.

    python bench/time_to_loss.py CORPUS.jsonl.xz BPE_FOLDER [seconds=60] [optimizer=muon] [rate=6e-3] [rest=1] [batch=32] ...

Documents whose line number leaves 7 modulo 100 are validation, the rest training, an end-of-text after each. The loss is that of the first
524,288 tokens of validation, in windows of 1,024. The clock counts training steps only; the schedule is a cosine over the seconds given
with 5% of warm-up. A word `then` parts the settings of several runs, each of which begins with those before it.
"""

from __future__ import annotations

import gc
import json
import lzma
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from textmill.config import ModelConfig, RunConfig, TorchEngine, TrainConfig
from textmill.engines import Engine, Sums, open_engine
from textmill.models import open_family
from textmill.schedules import lr_at
from textmill.tokens.batches.batch import Batch

LENGTH, END, VALID = 1024, 50256, 524288
TICKS = 100_000
"""The schedule's steps: the clock is read into so many."""
SETTINGS: dict[str, Any] = {
    "seconds": 60.0, "target": 4.416, "optimizer": "muon", "rate": 6e-3, "rest": 1.0, "batch": 32, "decay": 0.1, "beta2": 0.95,
    "size": "small", "precision": "auto", "seed": 1,
}  # fmt: skip


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


def batch_at(tokens: Any, order: Any, step: int, size: int) -> Batch:
    """Windows in a shuffled order, over and over."""
    places = np.arange(step * size, (step + 1) * size)
    starts = order[places % len(order)].astype(np.int64) * LENGTH
    ids = tokens[starts[:, None] + np.arange(LENGTH + 1)].astype(np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], places)


def loss_of(engine: Engine, valid: Any) -> float:
    """The mean loss of the validation windows."""
    sums = Sums(0.0, 0, 0)
    for step in range(VALID // LENGTH // 64):
        sums = sums + engine.eval_step(batch_at(valid, np.arange(VALID // LENGTH), step, 64))
    return sums.loss / sums.asked


def fresh(settings: dict[str, Any]) -> tuple[Engine, TrainConfig]:
    """An engine with first weights."""
    train = TrainConfig(
        batch=settings["batch"], length=LENGTH, steps=TICKS, learning_rate=settings["rate"], warmup=0.05, optimizer=settings["optimizer"],
        rest_rate=settings["rest"], weight_decay=settings["decay"], betas=[0.9, settings["beta2"]],
    )  # fmt: skip
    engine = TorchEngine(compile=True, micro_batch=min(64, settings["batch"]), precision=settings["precision"])
    config = RunConfig(model=ModelConfig(size=settings["size"]), train=train, engine=engine)
    family = open_family("gpt2")
    shape = family.shape_of(config.model, vocab=END + 1, end=END, length=LENGTH)
    opened = open_engine(config, shape)
    opened.load(family.first_weights(shape, settings["seed"]), [], 0, "start")
    return opened, train


def run(settings: dict[str, Any], train: Any, valid: Any) -> float:
    """Train by the clock, look at the validation loss on the way, print when the target was met; return the last loss."""
    order = np.random.default_rng(settings["seed"]).permutation((len(train) - 1) // LENGTH)
    engine, config = fresh(settings)
    for step in range(4):  # compiles; these steps' engine is dropped, and the clock starts with the next one's
        float(engine.train_step(batch_at(train, order, step, settings["batch"]), step, 0.0).loss)
    del engine
    gc.collect()
    engine, config = fresh(settings)
    float(engine.train_step(batch_at(train, order, 0, settings["batch"]), 0, 0.0).loss)
    looks = [share * settings["seconds"] for share in (0.25, 0.5, 0.7, 0.8, 0.9, 0.95)]
    spent, step, seen, met = 0.0, 0, [], None
    while spent < settings["seconds"]:
        until, begun, start = looks.pop(0) if looks else settings["seconds"], time.perf_counter(), spent
        while spent < until:
            rate = lr_at(int(spent / settings["seconds"] * TICKS), config)
            last = engine.train_step(batch_at(train, order, step, settings["batch"]), step, rate)
            step, spent = step + 1, start + time.perf_counter() - begun
        training = last.loss
        spent = start + time.perf_counter() - begun
        loss = loss_of(engine, valid)
        met = met or (spent if loss <= settings["target"] else None)
        seen.append(f"{spent:.1f} s {loss:.3f}")
    chosen = " ".join(f"{key}={settings[key]}" for key in ("optimizer", "rate", "rest", "batch", "decay", "beta2", "seed"))
    tokens = step * settings["batch"] * LENGTH
    print(f"{chosen} | {'; '.join(seen)} | train {training:.3f} | {tokens / spent:,.0f} tokens/s, {tokens / 1e6:.1f}M", flush=True)
    print(f"  {settings['target']} met at {met:.1f} s" if met else f"  {settings['target']} not met", flush=True)
    engine.close()
    return loss


def main(words: list[str]) -> None:
    """Every run that the words ask for."""
    train, valid = tokens_of(Path(words[0]), Path(words[1]))
    print(f"{len(train):,} tokens of training, {len(valid):,} of validation", flush=True)
    settings, asked = dict(SETTINGS), [*words[2:], "then"]
    for word in asked:
        if word == "then":
            run(settings, train, valid)
            gc.collect()
        else:
            key, _, value = word.partition("=")
            settings[key] = type(SETTINGS[key])(value)


if __name__ == "__main__":
    main(sys.argv[1:])
