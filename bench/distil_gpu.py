"""Distillation of a 124M GPT-2 into six of its blocks (82M) on one GPU: throughput next to transformers, and memory.

    python bench/distil_gpu.py TOKENS [--batch 32] [--length 1024] [--steps 20] [--precision bf16] [--small]

TOKENS is the prefix of a token store (its .bin or .idx file will do), or a file of raw uint16 ids; GPT-2's vocabulary.

1. Tokens/s and steps/s of the torch engine with `train.distil`, and of two plain loops around transformers'
   GPT2LMHeadModel: teacher in eval mode under no_grad, student, both under torch.compile, autocast, KL at temperature 2
   and cross-entropy on all logits, clipping, fused AdamW. In one loop the loss is eager, in the other compiled.
2. Peak memory and time of the loss alone, from hidden states to their gradients: ours, compiled as in a compiled run,
   and torch's F.kl_div.

--small tries everything in a minute on a CPU with a tiny net, without meaning.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from engines_gpu import VOCAB, measure_steps
from numpy.typing import NDArray
from torch import Tensor

from textmill.config import DistilConfig, ModelConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.devices import autocast, open_device, torch_dtype
from textmill.engines import open_engine
from textmill.engines.distillation_torch import Prediction, distillation_loss
from textmill.engines.losses_torch import WeightedLabels
from textmill.models import initial_weights, open_family
from textmill.storage.tensor_files import encode_safetensors
from textmill.tokens.batches.batch import Batch
from textmill.tokens.store import open_store, store_paths, store_prefix

TEMPERATURE, KL, LABELS = 2.0, 0.5, 0.5


def read_ids(path: Path) -> NDArray[Any]:
    """The ids of a token store or of a raw file, memory-mapped."""
    prefix = store_prefix(path)
    is_store = all(part.is_file() for part in store_paths(prefix))
    return open_store(prefix).ids if is_store else np.memmap(path, np.uint16, "r")


def batches_of(ids: NDArray[Any], batch: int, length: int, count: int) -> list[Batch]:
    """Some batches of windows from the start of the ids."""
    windows = np.lib.stride_tricks.sliding_window_view(ids, length + 1)[::length]
    if len(windows) < batch:
        raise SystemExit(f"TOKENS: has {len(ids):,} ids, a batch needs {batch * length + 1:,}")
    found = []
    for start in range(count):
        rows = np.arange(start * batch, (start + 1) * batch) % len(windows)
        chosen = windows[rows].astype(np.int32)
        found.append(Batch(chosen[:, :-1], chosen[:, 1:], np.arange(start * batch, (start + 1) * batch)))
    return found


def shape_of(layers: int, options: argparse.Namespace) -> Any:
    """GPT-2 small with so many blocks; a tiny net with --small."""
    given = {"layers": layers, "positions": options.length}
    sizes = ShapeConfig(**given, **({"width": 64, "heads": 2} if options.small else {}))
    return open_family("gpt2").shape_of(ModelConfig(size="small", shape=sizes), vocab=VOCAB, eos_id=VOCAB - 1)


def write_teacher(shape: Any, folder: Path) -> str:
    """A model folder with random weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(open_family("gpt2").hf_config_of(shape)))
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines(encode_safetensors(list(initial_weights(shape, 2))))
    return str(folder)


def open_engine_step(teacher: str, shape: Any, batches: list[Batch], options: argparse.Namespace) -> Any:
    """A step of the torch engine."""
    distil = DistilConfig(teachers=[teacher], temperature=TEMPERATURE, kl=KL, labels=LABELS)
    train = TrainConfig(batch=options.batch, length=options.length, learning_rate=1e-4, distil=distil)
    section = TorchEngine(compile=not options.small, micro_batch=options.batch, precision=options.precision)
    engine = open_engine(section, train, shape)
    engine.load(initial_weights(shape, 1), [], 0, "start")

    class Loss:
        def __init__(self, number: int) -> None:
            self.step = engine.train_step(batches[number % len(batches)], number, 1e-4)

        def __float__(self) -> float:
            return self.step.loss

    return Loss


def plain_loss(student_NTV: Tensor, teacher_NTV: Tensor, labels_NT: Tensor) -> tuple[Tensor, Tensor]:
    """The loss from all logits, and the labels' part of it."""
    student, teacher, labels = student_NTV.float().flatten(0, 1), teacher_NTV.float().flatten(0, 1), labels_NT.flatten()
    target = (teacher / TEMPERATURE).softmax(1)
    divergence = F.kl_div((student / TEMPERATURE).log_softmax(1), target, reduction="batchmean") * TEMPERATURE**2
    cross_entropy = F.cross_entropy(student, labels)
    return KL * divergence + LABELS * cross_entropy, cross_entropy.detach()


def open_transformers_step(
    teacher: str, shape: Any, batches: list[Batch], options: argparse.Namespace, *, compile_loss: bool
) -> Callable[[int], Tensor]:
    """A step of a plain loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    device = open_device("auto")
    precision = torch_dtype(options.precision, device)
    student = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(shape))).to(device).train()
    frozen = GPT2LMHeadModel.from_pretrained(teacher).to(device).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run_student, run_teacher = (net if options.small else torch.compile(net) for net in (student, frozen))
    compute_loss = torch.compile(plain_loss) if compile_loss and not options.small else plain_loss
    host = [(torch.from_numpy(one.inputs).long(), torch.from_numpy(one.labels).long()) for one in batches]
    if device.type == "cuda":
        host = [(inputs.pin_memory(), labels.pin_memory()) for inputs, labels in host]

    def step(number: int) -> Tensor:
        inputs, labels = (one.to(device, non_blocking=True) for one in host[number % len(host)])
        with autocast(device, precision):
            with torch.no_grad():
                teacher_logits = run_teacher(inputs, use_cache=False).logits
            student_logits = run_student(inputs, use_cache=False).logits
        loss, reported = compute_loss(student_logits, teacher_logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return reported

    return step


def forget(device: torch.device) -> None:
    """Free all memory of what was measured before."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def compare_throughput(ids: NDArray[Any], folder: Path, options: argparse.Namespace) -> None:
    """Print a line for each of the three loops, and the ratios of their rates."""
    device, student = open_device("auto"), shape_of(options.layers // 2, options)
    teacher = write_teacher(shape_of(options.layers, options), folder / "teacher")
    batches, rates = batches_of(ids, options.batch, options.length, 8), dict[str, float]()
    plain = (teacher, student, batches, options)
    openers: dict[str, Callable[[], Any]] = {
        "textmill": lambda: open_engine_step(*plain),
        "transformers": lambda: open_transformers_step(*plain, compile_loss=False),
        "transformers, loss compiled": lambda: open_transformers_step(*plain, compile_loss=True),
    }
    for name, opener in openers.items():
        forget(device)
        first, each, loss = measure_steps(opener(), options.steps)
        assert math.isfinite(loss)
        rates[name] = options.batch * options.length / each
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB | " if device.type == "cuda" else ""
        line = f"{name} | {rates[name]:,.0f} tokens/s | {1 / each:.2f} steps/s | {memory}first step {first:.1f} s"
        print(f"{line} | loss {loss:.4f}", flush=True)
    ratios = (f"{rates['textmill'] / rate:.2f} x {name}" for name, rate in rates.items() if name != "textmill")
    print(f"throughput of textmill: {'; '.join(ratios)}", flush=True)
    forget(device)


def measure_loss(compute: Callable[[], Tensor], leaves: list[Tensor], device: torch.device) -> tuple[float, int]:
    """Seconds of a loss with its gradients, and the peak of memory above what was there before."""
    spent, peak = 0.0, 0
    for _ in range(3):
        for leaf in leaves:
            leaf.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        compute().backward()  # type: ignore[no-untyped-call]
        if device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
        spent = time.perf_counter() - start
    return spent, peak


def compare_loss(options: argparse.Namespace) -> None:
    """Print time and peak memory of the loss alone, ours and torch's, and the ratio."""
    device = open_device("auto")
    precision = torch_dtype(options.precision, device)
    shape, tokens = shape_of(options.layers // 2, options), options.loss_samples * options.length
    draw = torch.Generator(device).manual_seed(1)

    def normal(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*sizes, generator=draw, device=device).mul_(0.2 if len(sizes) == 2 else 1).to(dtype)

    x, taught = (normal(tokens, shape.width, dtype=precision) for _ in range(2))
    head, teacher_head = (normal(shape.padded_vocab, shape.width) for _ in range(2))
    labels = torch.randint(0, VOCAB, (tokens,), generator=draw, device=device)
    weights = torch.full((tokens,), 1 / tokens, device=device)
    leaves = [x.requires_grad_(), head.requires_grad_()]
    train = TrainConfig(distil=DistilConfig(teachers=["x"], temperature=TEMPERATURE, kl=KL, labels=LABELS))

    def ours() -> Tensor:
        predictions = [Prediction(taught, teacher_head, None)]
        report = weights.new_zeros(3)
        return distillation_loss(
            x,
            head,
            WeightedLabels(labels, weights),
            VOCAB,
            predictions,
            train,
            report,
            gradient_is_one=True,
            compiled=not options.small,
        )

    def plain() -> Tensor:
        with autocast(device, precision):
            student, teacher = F.linear(x, head), F.linear(taught, teacher_head).detach()
        return plain_loss(student[None, :, :VOCAB], teacher[None, :, :VOCAB], labels[None])[0]

    found = {name: measure_loss(compute, leaves, device) for name, compute in (("ours", ours), ("torch", plain))}
    with torch.no_grad():
        difference = abs(float(ours()) / float(plain()) - 1)
    print(f"loss alone, {tokens:,} tokens x {VOCAB:,}, {options.precision}, relative difference {difference:.1e}")
    for name, (spent, peak) in found.items():
        print(f"  {name} | {1e3 * spent:.1f} ms | {peak / 2**30:.3f} GiB")
    if found["torch"][1]:
        print(f"  peak memory of the loss: {found['ours'][1] / found['torch'][1]:.3f} of torch's")


def main() -> None:
    """Measure throughput, then the loss alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=Path)
    for name, default in (("batch", 32), ("length", 1024), ("steps", 20), ("layers", 12), ("loss-samples", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        tiny = {"batch": 2, "length": 16, "steps": 2, "layers": 2, "loss_samples": 2, "precision": "fp32"}
        vars(options).update(tiny)
    device = open_device("auto")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {options.batch} x {options.length} tokens, {options.precision}", flush=True
    )
    with tempfile.TemporaryDirectory(prefix="distil-") as folder:
        compare_throughput(read_ids(options.tokens), Path(folder), options)
    compare_loss(options)


if __name__ == "__main__":
    main()
