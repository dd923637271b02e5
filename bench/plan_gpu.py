"""Memory and time that `textmill plan` expects, compared with real steps on one GPU.

    python bench/plan_gpu.py [NAME ...] [jobs=4] [steps=40] [small=0]

Each setting of SETTINGS (or those named) runs in its own process, `jobs` of them at a time; only one of them at a time
runs its timed steps. Memory: the most that torch's allocator reserved and that tensors took, in GB, after the steps.
Time: `steps` steps without a wait after each, on random tokens, next to the plan's probe. small=1: tiny nets, also on
a CPU, to try the script.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from train_gpu import make_batch

from textmill.commands.plan import probe_speed, target_of
from textmill.config import RunConfig
from textmill.engines import open_engine
from textmill.engines.memory import Estimator
from textmill.models import initial_weights, open_family
from textmill.models.lora import initial_adapters

GPT2 = {"family": "gpt2", "vocab": 50257, "length": 1024}
BERT = {"family": "bert", "vocab": 30522, "length": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {**GPT2, "size": "small", "batch": 64},
    "small, batch 16": {**GPT2, "size": "small", "batch": 16},
    "small, Muon": {**GPT2, "size": "small", "batch": 64, "train": {"optimizer": "muon"}},
    "small, fp32": {**GPT2, "size": "small", "batch": 16, "engine": {"precision": "fp32"}},
    "small, fp8": {**GPT2, "size": "small", "batch": 64, "engine": {"precision": "fp8"}},
    "small, not compiled": {**GPT2, "size": "small", "batch": 16, "engine": {"compile": False}},
    "small, dropout": {**GPT2, "size": "small", "batch": 16, "dropout": 0.1},
    "small, LoRA": {**GPT2, "size": "small", "batch": 32, "model": {"init_from": "other", "lora": {"rank": 8}}},
    "small, two passes": {**GPT2, "size": "small", "batch": 64, "engine": {"micro_batch": 32}},
    "medium": {**GPT2, "size": "medium", "batch": 32},
    "medium, recompute": {**GPT2, "size": "medium", "batch": 32, "engine": {"activation_checkpointing": 1}},
    "large": {**GPT2, "size": "large", "batch": 8},
    "xl, recompute, Muon": {
        **GPT2,
        "size": "xl",
        "batch": 16,
        "train": {"optimizer": "muon"},
        "engine": {"activation_checkpointing": 2},
    },
    "BERT base": {**BERT, "size": "base", "batch": 64},
    "BERT base, 128 tokens": {**BERT, "size": "base", "length": 128, "batch": 256},
    "BERT large": {**BERT, "size": "large", "batch": 32},
}


def config_of(one: dict[str, Any], small: bool) -> tuple[RunConfig, Any]:
    """The run's config and shape."""
    batch, length, vocab = (4, 64, 512) if small else (one["batch"], one["length"], one["vocab"])
    size = ("nano" if one["family"] == "gpt2" else "tiny") if small else one["size"]
    engine = {"micro_batch": batch, **one.get("engine", {})}
    if small:
        engine = {**engine, "micro_batch": min(batch, engine["micro_batch"]), "precision": "auto", "compile": False}
    model = {"family": one["family"], "size": size, **one.get("model", {})}
    train = {"batch": batch, "length": length, "learning_rate": 1e-4, **one.get("train", {})}
    config = RunConfig.model_validate({"model": model, "train": train, "engine": {"kind": "torch", **engine}})
    shape = open_family(one["family"]).shape_of(config.model, vocab=vocab, eos_id=0, length=length)
    return config, shape.with_dropout(one.get("dropout", 0.0))


def measure(name: str, steps: int, small: bool, lock: Path) -> dict[str, Any]:
    """The plan for a setting and what its steps take, in this process."""
    config, shape = config_of(SETTINGS[name], small)
    target = target_of(config.plan, config.engine)
    estimator = Estimator(shape, config.train, config.model.lora)
    estimate = estimator.estimate(config.engine, 1, target.device)
    engine = open_engine(config.engine, config.train, shape, config.model.lora)
    lora = config.model.lora
    weights: Any = initial_weights(shape, 1)
    engine.load([*weights, *initial_adapters(shape, lora, 0)] if lora else weights, [], 0, "start")
    options = {"family": shape.family, "length": config.train.length, "vocab": shape.vocab}
    batch = make_batch(config.train.batch, options)
    for step in range(3):
        _ = engine.train_step(batch, step, 1e-4).loss
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.perf_counter()
        for step in range(steps):
            result = engine.train_step(batch, step, 1e-4)
        loss = result.loss
        seconds = (time.perf_counter() - began) / steps
    found = {"seconds": seconds, "loss": loss, "planned": estimate.memory.total, "parts": asdict(estimate.memory)}
    if target.device.on_gpu:
        found |= {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
    engine.close()
    del engine
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        found["probed"] = probe_speed(config.engine, estimator, estimate, 20).step_seconds
    return found


def run(name: str, steps: str, small: str, lock: str) -> str:
    """One line of the table, measured in another process."""
    command = [sys.executable, __file__, "--one", name, steps, small, lock]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return f"| {name} | failed: {done.stderr.strip().splitlines()[-1][:200]} |"
    one = json.loads(done.stdout.splitlines()[-1])
    gigabytes = {key: one.get(key, 0) / 1e9 for key in ("planned", "reserved", "allocated")}
    errors = [f"{one['planned'] / one[key] - 1:+.0%}" if one.get(key) else "-" for key in ("reserved", "allocated")]
    parts = ", ".join(f"{part} {size / 1e9:.2f}" for part, size in one["parts"].items())
    return (
        f"| {name} | {gigabytes['reserved']:.2f} | {gigabytes['allocated']:.2f} | {gigabytes['planned']:.2f} "
        f"| {errors[0]} | {errors[1]} | {1e3 * one['seconds']:.1f} | {1e3 * one['probed']:.1f} "
        f"| {one['probed'] / one['seconds'] - 1:+.0%} | {parts}"
    )


def main(arguments: list[str]) -> None:
    """Measure every setting."""
    options = {"jobs": "4", "steps": "40", "small": "0"}
    options |= dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    names = [argument for argument in arguments if "=" not in argument] or list(SETTINGS)
    print("| setting | reserved, GB | tensors, GB | planned, GB | error | error | step, ms | probe, ms | error |")
    print("|---" * 9 + "|")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(int(options["jobs"])) as pool:
        lock = str(Path(folder) / "lock")
        for line in pool.map(lambda name: run(name, options["steps"], options["small"], lock), names):
            print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        name, steps, small, lock = sys.argv[2:]
        print(json.dumps(measure(name, int(steps), small == "1", Path(lock))))
    else:
        main(sys.argv[1:])
