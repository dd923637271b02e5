"""Tokens a second of the torch engine and of transformers' GPT-2, both compiled, on one GPU in one run; with memory and start-up.

    python bench/train_gpu.py [SIZE:BATCH ...] [precision=bf16] [apart=0] [length=1024] [steps=30] [optimizer=adamw] [peer=1] [kernels=0]

Without sizes: small:64 and medium:32; large:16 and xl:8 (1.5B) are there too. precision: fp32, bf16, fp16, fp8 (the peer has no fp8 and
stays in bf16); several with commas, such as bf16,fp8, are measured one after the other. The peer is GPT2LMHeadModel under torch.compile
with autocast, fused AdamW and clipping, on the same random tokens; the last column is a line's rate over those of ours before it.
`apart=300`: our samples are packed of documents of about 300 tokens, each kept to itself; apart=0,300 measures without and with that.
`kernels=1` prints where the GPU's time goes, `compile=0` leaves both uncompiled. MFU counts 6N + 12LHQT operations a token.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engines_gpu import VOCAB, batch_of, losses_of, measured

from textmill.config import ModelConfig, RunConfig, TorchEngine, TrainConfig
from textmill.devices import open_device, peak_flops_of, torch_dtype
from textmill.engines import open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch

OPTIONS: dict[str, Any] = {
    "precision": "bf16", "apart": "0", "length": 1024, "steps": 30, "optimizer": "adamw", "peer": 1, "kernels": 0, "compile": 1,
}  # fmt: skip


def ours(shape: Any, size: str, batch: int, options: dict[str, Any]) -> Callable[[int], Any]:
    """A step of the engine."""
    train = TrainConfig(batch=batch, length=options["length"], learning_rate=1e-4, optimizer=options["optimizer"])
    engine = TorchEngine(compile=bool(options["compile"]), micro_batch=batch, precision=options["precision"])
    opened = open_engine(RunConfig(model=ModelConfig(size=size), train=train, engine=engine), shape)
    opened.load(initial_weights(shape, 1), [], 0, "start")
    return losses_of(opened, packed(batch_of(batch, options["length"]), int(options["apart"])))


def packed(batch: Batch, tokens: int) -> Batch:
    """The same, of documents of about so many tokens; as it is, if 0."""
    if not tokens:
        return batch
    begins = np.random.default_rng(1).random(batch.inputs.shape) < 1 / tokens
    return replace(batch, documents=begins.cumsum(1, dtype=np.int32) + 1)


def theirs(shape: Any, batch: int, options: dict[str, Any]) -> Callable[[int], Any]:
    """A step of transformers' model in a plain loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    device = open_device("auto")
    precision = torch_dtype(options["precision"], device)
    net = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(shape))).to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    inputs = torch.from_numpy(batch_of(batch, options["length"]).inputs).long().to(device)
    forward = torch.compile(net) if options["compile"] else net

    def step(number: int) -> Any:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = forward(inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def kernels(step: Callable[[int], Any], count: int = 3) -> None:
    """Where the GPU's time goes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(count):
            loss = step(number)
        float(loss)
    rows = sorted(
        ((row.self_device_time_total / count / 1e3, row.count // count, row.key) for row in profile.key_averages()),
        reverse=True,
    )
    total = sum(row[0] for row in rows)
    for spent, calls, name in rows[:30]:
        print(f"  {spent:8.3f} ms {spent / total:6.1%} x{calls:<4d} {name[:110]}")


def compared(word: str, options: dict[str, Any], device: torch.device, rates: dict[str, float]) -> None:
    """A line for a size in one way, and one for the peer, whose ratio is to ours; rates of ours are kept for the next way's."""
    length, peak = options["length"], peak_flops_of(device)
    size, _, number = word.partition(":")
    batch = int(number or 32)
    shape = open_family("gpt2").shape_of(ModelConfig(size=size), vocab=VOCAB, end=0, length=length)
    how = options["precision"] + (f", documents of {options['apart']}" if int(options["apart"]) else "")
    for who in ("textmill", "transformers")[: 1 + options["peer"]]:
        torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
        step = ours(shape, size, batch, options) if who == "textmill" else theirs(shape, batch, options)
        first, each, loss = measured(step, options["steps"])
        assert math.isfinite(loss)
        rate = batch * length / each
        held = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
        used = f"{rate * shape.flops_per_token(length) / peak:.1%} MFU" if peak else ""
        against = [f"{name} x{rate / other:.3f}" for name, other in rates.items()]
        line = f"{size} {batch} x {length} | {who} {how} | {rate:,.0f} tokens/s | {used} | {held:.1f} GiB"
        print(f"{line} | first step {first:.1f} s | {', '.join(against)}", flush=True)
        if who == "textmill":
            rates[how] = rate
            kernels(step) if options["kernels"] else None
        del step
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(words: list[str]) -> None:
    """Measure every size asked for in every way asked for."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    options = {key: type(value)(given.get(key, value)) for key, value in OPTIONS.items()}
    device = open_device("auto")
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{card}, torch {torch.__version__}, length {options['length']}, {options['optimizer']}")
    for word in [word for word in words if "=" not in word] or ["small:64", "medium:32"]:
        rates: dict[str, float] = {}
        ways = itertools.product(options["precision"].split(","), options["apart"].split(","))
        for number, (precision, apart) in enumerate(ways):
            peer = options["peer"] if not number else 0
            compared(word, {**options, "precision": precision, "apart": apart, "peer": peer}, device, rates)


if __name__ == "__main__":
    main(sys.argv[1:])
