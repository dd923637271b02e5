"""Tokens/s of the torch engine and of transformers' model, both compiled, on one GPU in one run; memory, first step.

    python bench/train_gpu.py [SIZE:BATCH ...] [family=gpt2] [precision=bf16] [document_tokens=0] [length=1024]
                              [steps=30] [optimizer=adamw] [dropout=0] [compare=1] [kernels=0] [compile=1]
                              [vocab=0]

The default sizes are small:64 and medium:32; large:16, xl:8 (1.5B) and LAYERSxWIDTH:BATCH work too. The transformers
model is GPT2LMHeadModel, or the family's class, under torch.compile with autocast, fused AdamW and clipping, on the
same random tokens. The last column is a line's rate divided by the rates of textmill in the lines before it. MFU
counts 6N + 12LHQT operations per token, BERT's head for labelled tokens only.

family           gpt2, llama, bert (base:256 family=bert length=128; 15% of the tokens have labels, a pair per sample)
precision        fp32, bf16, fp16, fp8 (transformers has no fp8 and uses bf16); bf16,fp8 measures one after the other
document_tokens  mean document length of our packed samples, with documents isolated from each other; 0: one document
                 per sample; 0,300 measures both
compare          0: without transformers
kernels          1: print where the GPU's time goes
compile          0: compile neither of the two; small nets then also without CUDA graphs
vocab            0: that of the family's published models
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from engines_gpu import VOCAB, measure_steps, new_step, random_batch, read_options

from textmill.config import SIZES, ModelConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.devices import open_device, peak_flops_of, torch_dtype
from textmill.engines import open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import IGNORED, Batch

OPTIONS: dict[str, Any] = {
    "family": "gpt2",
    "precision": "bf16",
    "document_tokens": "0",
    "length": 1024,
    "steps": 30,
    "optimizer": "adamw",
    "dropout": 0.0,
    "compare": 1,
    "kernels": 0,
    "compile": 1,
    "vocab": 0,
}
VOCABS = {"bert": 30522}
LABELLED, PAIR_CLASSES = 0.15, 2


def open_engine_step(shape: Any, size: str, batch: int, options: dict[str, Any]) -> Callable[[int], Any]:
    """Return a step of the torch engine."""
    train = TrainConfig(batch=batch, length=options["length"], learning_rate=1e-4, optimizer=options["optimizer"])
    engine = TorchEngine(compile=bool(options["compile"]), micro_batch=batch, precision=options["precision"])
    opened: Any = open_engine(engine, train, shape)
    if not options["graphs"]:
        opened.graphs = None
    opened.load(initial_weights(shape, 1), [], 0, "start")
    return new_step(opened, pack_documents(make_batch(batch, options), int(options["document_tokens"])))


def make_batch(rows: int, options: dict[str, Any]) -> Batch:
    """Return random tokens; for a masked model with labels at some of them, two segments and the class of the pair."""
    length, vocab = options["length"], vocab_of(options)
    batch = random_batch(rows, length)
    inputs, labels = batch.inputs % vocab, batch.labels % vocab
    if open_family(options["family"]).OBJECTIVE != "masked":
        return replace(batch, inputs=inputs, labels=labels)
    dice = np.random.default_rng(1)
    labels = np.where(dice.random(labels.shape) < LABELLED, labels, IGNORED).astype(np.int32)
    types = np.repeat(np.arange(length, dtype=np.int32)[None] * 2 // length, rows, 0)
    pairs = np.full_like(labels, IGNORED)
    pairs[:, 0] = dice.integers(0, PAIR_CLASSES, rows)
    return replace(batch, inputs=inputs, labels=labels, types=types, pair_labels=pairs)


def vocab_of(options: dict[str, Any]) -> int:
    """Return the size of the vocabulary."""
    return options.get("vocab") or VOCABS.get(options["family"], VOCAB)


def pack_documents(batch: Batch, tokens: int) -> Batch:
    """Return the same tokens as documents of about so many tokens; unchanged if 0."""
    if not tokens:
        return batch
    is_start = np.random.default_rng(1).random(batch.inputs.shape) < 1 / tokens
    return replace(batch, documents=is_start.cumsum(1, dtype=np.int32) + 1)


def open_transformers_step(shape: Any, batch: int, options: dict[str, Any]) -> Callable[[int], Any]:
    """Return a step of transformers' model in a plain loop."""
    import transformers

    device = open_device("auto")
    precision = torch_dtype(options["precision"], device)
    known = open_family(options["family"]).hf_config_of(shape)
    config = transformers.AutoConfig.for_model(**known)
    net = getattr(transformers, known["architectures"][0])(config).to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    made = make_batch(batch, options)
    arrays = {"input_ids": made.inputs, "labels": made.inputs}
    if made.types is not None and made.pair_labels is not None:
        pairs = made.pair_labels[:, 0]
        arrays |= {"labels": made.labels, "token_type_ids": made.types, "next_sentence_label": pairs}
    given = {name: torch.from_numpy(array).long().to(device) for name, array in arrays.items()}
    forward = torch.compile(net) if options["compile"] else net

    def step(number: int) -> Any:
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = forward(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def print_kernels(step: Callable[[int], Any], count: int = 3) -> None:
    """Print the kernels that take most of the GPU's time."""
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


def compare(argument: str, options: dict[str, Any], device: torch.device, rates: dict[str, float]) -> None:
    """Print a line for textmill and one for transformers; add textmill's rate to `rates`, for the lines that follow."""
    length, peak = options["length"], peak_flops_of(device)
    size, _, number = argument.partition(":")
    batch, document_tokens = int(number or 32), int(options["document_tokens"])
    family = open_family(options["family"])
    own = {}
    if layers_width := re.fullmatch(r"(\d+)x(\d+)", size):
        layers, width = map(int, layers_width.groups())
        own = {"layers": layers, "heads": width // 64, "width": width, "positions": length}
    model = ModelConfig(
        family=options["family"], size=next(iter(SIZES[family.NAME])) if own else size, shape=ShapeConfig(**own)
    )
    shape = family.shape_of(model, vocab=vocab_of(options), eos_id=0, length=length).with_dropout(options["dropout"])
    variant = options["precision"] + (f", documents of {document_tokens}" if document_tokens else "")
    names = ["textmill", *["textmill without graphs"] * (not options["compile"])]
    for name in [*names, *["transformers"] * options["compare"]]:
        torch.cuda.reset_peak_memory_stats() if device.type == "cuda" else None
        if name in names:
            step = open_engine_step(shape, size, batch, {**options, "graphs": name == "textmill"})
        else:
            step = open_transformers_step(shape, batch, options)
        first, each, loss = measure_steps(step, options["steps"])
        assert math.isfinite(loss)
        rate = batch * length / each
        memory = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else 0.0
        mfu = f"{rate * shape.flops_per_token(length) / peak:.1%} MFU" if peak else ""
        ratios = [f"{other} x{rate / before:.3f}" for other, before in rates.items()]
        line = f"{size} {batch} x {length} | {name} {variant} | {rate:,.0f} tokens/s | {mfu} | {memory:.1f} GiB"
        print(f"{line} | first step {first:.1f} s | {', '.join(ratios)}", flush=True)
        if name == "textmill":
            rates[variant] = rate
            print_kernels(step) if options["kernels"] else None
        del step
        gc.collect()
        torch._dynamo.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main(arguments: list[str]) -> None:
    """Measure every size with every precision and document length."""
    sizes, options = read_options(arguments, OPTIONS)
    device = open_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, length {options['length']}, {options['optimizer']}")
    for size in sizes:
        rates: dict[str, float] = {}
        variants = itertools.product(options["precision"].split(","), options["document_tokens"].split(","))
        for number, (precision, document_tokens) in enumerate(variants):
            changes = {"precision": precision, "document_tokens": document_tokens}
            compare(size, {**options, **changes, "compare": 0 if number else options["compare"]}, device, rates)


if __name__ == "__main__":
    main(sys.argv[1:])
