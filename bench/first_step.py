"""Tokens/s of the torch engine and of transformers' GPT-2 on the same batches, in one run.

    python bench/first_step.py [size] [batch] [length] [steps] [1 to compile textmill's net]

The transformers model is GPT2LMHeadModel with the same weights, precision and fused AdamW, not compiled, as in most
scripts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from textmill.config import ModelConfig, RunConfig, TorchEngine, TrainConfig
from textmill.devices import open_device, torch_dtype
from textmill.engines import open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch

VOCAB = 50257


def rate(step: Callable[[int], float], steps: int, tokens: int) -> float:
    """Return the tokens/s after three warm-up steps; reading the last loss waits for the device."""
    for number in range(3):
        step(number)
    start = time.perf_counter()
    for number in range(steps):
        loss = step(number)
    assert np.isfinite(float(loss))
    return steps * tokens / (time.perf_counter() - start)


def main(size: str = "nano", batch: int = 8, length: int = 256, steps: int = 10, compiled: int = 0) -> None:
    """Measure both and print the ratio."""
    config = RunConfig(model=ModelConfig(size=size), train=TrainConfig(batch=batch, length=length, learning_rate=1e-4))
    config = config.model_copy(update={"engine": TorchEngine(compile=bool(compiled))})
    family, device = open_family("gpt2"), open_device("auto")
    shape = family.shape_of(config.model, vocab=VOCAB, eos_id=0, length=length)
    ids = np.random.default_rng(0).integers(0, VOCAB, (batch, length + 1), dtype=np.int32)
    ours = open_engine(config.engine, config.train, shape, config.model.lora)
    ours.load(initial_weights(shape, 1), [], 0, "start")
    tokens = Batch(ids[:, :-1], ids[:, 1:], np.arange(batch))
    results = [ours.train_step(tokens, 0, 1e-4)]

    def our_step(number: int) -> float:
        results[0] = ours.train_step(tokens, number, 1e-4)
        return results[0].loss if number == steps - 1 else 0.0

    our_rate = rate(our_step, steps, batch * length)
    theirs = GPT2LMHeadModel(GPT2Config(**family.hf_config_of(shape))).to(device).train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-4, fused=True)
    inputs = torch.from_numpy(ids[:, :-1]).long().to(device)
    precision = torch_dtype("auto", device)

    def their_step(number: int) -> float:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = theirs(inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss) if number == steps - 1 else 0.0

    their_rate = rate(their_step, steps, batch * length)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{size} {batch} x {length} {precision}{' compiled' * compiled} on {name}, torch {torch.__version__}")
    print(
        f"textmill {our_rate:,.0f} tokens/s, transformers {their_rate:,.0f} tokens/s, ratio {our_rate / their_rate:.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "nano", *map(int, sys.argv[2:]))
