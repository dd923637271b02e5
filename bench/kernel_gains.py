"""What each hand-written kernel, tuner and trick gains of a whole training or decoding step, on one GPU.

    python bench/kernel_gains.py [--list] [--only PATTERN ...] [--device cpu] [--json FILE] [--rounds 4] [--seconds 500]

A setting is a training step (GPT-2 124M and 350M, Llama 124M, BERT base; fp8, Muon) or a decoding
step (one text and 64, greedy and sampled). In each, `base` is textmill as it is, and every variant is the same with one
thing switched off, so that torch's own operations, compiled where the net is compiled, do the work. All variants of a
setting run in one process in turns; the medians of the rounds are compared.

gain     how much more time a step takes without it, in percent of the step with it; below 0: it costs time
memory   the same for the peak memory of a step
--only   settings or SETTING/VARIANT with wildcards, such as 'gpt2-small*' or 'decode*/sampling'; base always runs
--device cpu    tiny nets, to test the script; nothing is to be learnt from the figures
--seconds       after so long no further setting or variant starts, and what was measured is printed
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

LAYERS = "textmill.models.base_torch"
VOCABS = {"bert": 30522}
VOCAB = 50257
Patches = dict[str, Any]
"""Values by "module:attribute", such as "textmill.kernels.matmul_torch:_spec_of"."""


@dataclass(frozen=True)
class Variant:
    """One thing switched off."""

    name: str
    patches: Callable[[], Patches]
    rebuild: bool = False
    """True if the patches act when an engine is opened, so that the variant needs one of its own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Other options of the setting, such as its precision."""


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """Replace attributes of modules and classes while the block runs."""
    with ExitStack() as stack:
        for name, value in patches.items():
            module, _, path = name.partition(":")
            holder: Any = import_module(module)
            *parents, last = path.split(".")
            for parent in parents:
                holder = getattr(holder, parent)
            stack.enter_context(patch.object(holder, last, value))
        yield


# Training: what replaces each kernel.


def no_norm_kernel() -> Patches:
    """LayerNorm as the compiler computes it; the residual is still added in the matmul, whose bias has a gradient."""
    matmul = import_module("textmill.kernels.matmul_torch")

    def add_linear(stream_NTF: Tensor, layer: Any, x_NTE: Tensor) -> Tensor:
        out: Tensor = matmul._linear(x_NTE, layer.weight, layer.bias, stream_NTF)
        return out

    def norm(x_NTE: Tensor, norm: Any, *biases: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x_NTE).to(x_NTE.dtype), x_NTE

    names = "textmill.kernels.matmul_torch:add_linear", f"{LAYERS}:norm_with_residual_gradient"
    return dict(zip(names, (add_linear, norm), strict=True))


def no_residual() -> Patches:
    """The residual stream is added by an operation of its own."""
    residual = import_module(LAYERS).Residual

    def norm_and_residual(x_NTE: Tensor, norm: Any, *others: Any, **options: Any) -> tuple[Tensor, Any]:
        return norm(x_NTE), residual(x_NTE)

    return {"textmill.models.gpt2.net_torch:norm_and_residual": norm_and_residual}


def no_tuned_matmuls() -> Patches:
    """The algorithms that cuBLAS chooses itself; everything else stays."""
    return {"textmill.kernels.matmul_torch:_spec_of": lambda *given: None}


def plain_linears() -> Patches:
    """Compiled torch operations in place of everything that belongs to the matmuls: nn.Linear, LayerNorm, QKV."""
    return {"textmill.kernels.matmul_torch:use_tuned_matmul": lambda *given: False}


def no_bias_gelu() -> Patches:
    """The compiler's GELU."""
    return {f"{LAYERS}:HAS_TRITON": False}


def no_joined_linears() -> Patches:
    """One matmul for each of queries, keys and values."""
    linear = import_module(LAYERS).linear

    def separate(x_NTE: Tensor, layers: Any, context: Any) -> tuple[Tensor, ...]:
        return tuple(linear(x_NTE, layer, context) for layer in layers)

    return {"textmill.models.bert.net_torch:linears": separate}


def no_cross_entropy() -> Patches:
    """torch operations, not compiled."""
    return {"textmill.engines.losses_torch:can_run_kernels": lambda tensor: False}


def compiled_cross_entropy() -> Patches:
    """torch operations, compiled."""
    losses = import_module("textmill.engines.losses_torch")

    def plain(logits_MV: Tensor, labels_M: Tensor, weights_M: Tensor, vocab: int) -> Tensor:
        values = logits_MV[:, :vocab].float()
        labelled_M = labels_M >= 0
        targets_M1 = labels_M.where(labelled_M, 0).long()[:, None]
        log_sum_M1 = values.logsumexp(1, keepdim=True)
        losses_M1 = log_sum_M1 - values.gather(1, targets_M1)
        weight_M1 = weights_M.where(labelled_M, 0)[:, None]
        own = torch.arange(vocab, device=values.device) == targets_M1
        logits_MV[:, :vocab] = ((values - log_sum_M1).exp() * weight_M1 - own * weight_M1).to(logits_MV.dtype)
        logits_MV[:, vocab:] = 0
        return losses_M1[:, 0].where(labelled_M, 0)

    compiled = torch.compile(plain, dynamic=False)

    def label_loss_and_gradient(logits_MV: Tensor, labels: Any, vocab: int, _: float) -> Tensor:
        out: Tensor = compiled(logits_MV, labels.labels_M, labels.weights_M, vocab)
        return out

    assert hasattr(losses, "label_loss_and_gradient")
    return {"textmill.engines.losses_torch:label_loss_and_gradient": label_loss_and_gradient}


def no_fp8_kernels() -> Patches:
    """Compiled torch operations for GELU, the gate and rounding to fp8."""
    fp8 = import_module("textmill.kernels.fp8_torch")

    def bias_gelu8(h: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, ...]:
        y = F.gelu(h.float() + bias.float(), approximate="tanh" if tanh else "none").to(h.dtype)
        return y, *fp8.quantize_rows(y)

    def bias_gelu8_backward(dy: Tensor, h: Tensor, bias: Tensor, tanh: bool) -> tuple[Tensor, ...]:
        x = h.float() + bias.float()
        dx = torch.ops.aten.gelu_backward(dy.float(), x, approximate="tanh" if tanh else "none")
        rounded = dx.to(h.dtype)
        return rounded, *fp8.quantize_rows(rounded), dx.sum(0)

    def gate8(h: Tensor, silu: bool) -> tuple[Tensor, ...]:
        gate, up = h.float().chunk(2, 1)
        found: tuple[Tensor, ...] = fp8.quantize_rows((fp8._active_and_slope(gate, silu)[0] * up).to(h.dtype))
        return found

    def gate8_backward(dy: Tensor, h: Tensor, silu: bool) -> tuple[Tensor, ...]:
        (gate, up), wide = h.float().chunk(2, 1), dy.float()
        active, slope = fp8._active_and_slope(gate, silu)
        dh = torch.cat([wide * up * slope, wide * active], 1).to(h.dtype)
        return (active * up).to(h.dtype), dh, *fp8.quantize_rows(dh)

    own = (bias_gelu8, bias_gelu8_backward, gate8, gate8_backward)
    return {f"textmill.kernels.fp8_torch:{function.__name__}": function for function in own}


def no_muon_kernels() -> Patches:
    """Muon with compiled torch operations around the matmuls."""
    return {"textmill.engines.optimizers.muon_torch:can_run_kernels": lambda tensor: False}


COMMON = [
    Variant("tuned-matmuls", no_tuned_matmuls),
    Variant("cross-entropy", no_cross_entropy),
    Variant("cross-entropy-vs-compiled", compiled_cross_entropy),
]
OF_GPT2 = [
    *COMMON,
    Variant("residual-in-matmul", no_residual),
    Variant("norm-kernel", no_norm_kernel),
    Variant("bias-gelu", no_bias_gelu),
    Variant("all-linears", plain_linears),
    Variant("all", lambda: {**plain_linears(), **no_bias_gelu(), **compiled_cross_entropy()}),
]
TRAINING: dict[str, tuple[dict[str, Any], list[Variant]]] = {
    "gpt2-small": ({"size": "small", "batch": 64}, OF_GPT2),
    "gpt2-medium": ({"size": "medium", "batch": 32}, OF_GPT2),
    "gpt2-fp8": (
        {"size": "small", "batch": 64, "precision": "fp8"},
        [Variant("fp8-kernels", no_fp8_kernels), Variant("fp8", dict, rebuild=True, options={"precision": "bf16"})],
    ),
    "gpt2-medium-fp8": (
        {"size": "medium", "batch": 32, "precision": "fp8"},
        [Variant("fp8-kernels", no_fp8_kernels), Variant("fp8", dict, rebuild=True, options={"precision": "bf16"})],
    ),
    "gpt2-muon": (
        {"size": "small", "batch": 64, "optimizer": "muon"},
        [Variant("muon-kernels", no_muon_kernels, rebuild=True)],
    ),
    "gpt2-muon-batch16": (
        {"size": "small", "batch": 16, "optimizer": "muon"},
        [Variant("muon-kernels", no_muon_kernels, rebuild=True)],
    ),
    "llama-small": (
        {"family": "llama", "size": "small", "batch": 64},
        [*COMMON, Variant("all-linears", plain_linears)],
    ),
    "llama-fp8": (
        {"family": "llama", "size": "small", "batch": 64, "precision": "fp8"},
        [Variant("fp8-kernels", no_fp8_kernels), Variant("fp8", dict, rebuild=True, options={"precision": "bf16"})],
    ),
    "bert-base": (
        {"family": "bert", "size": "base", "batch": 256, "length": 128},
        [
            *COMMON,
            Variant("joined-linears", no_joined_linears),
            Variant("bias-gelu", no_bias_gelu),
            Variant("all-linears", plain_linears),
            Variant("all", lambda: {**plain_linears(), **no_bias_gelu(), **compiled_cross_entropy()}),
        ],
    ),
}


class TrainingSteps:
    """Steps of the torch engine; variants that need no engine of their own share that of `base`."""

    def __init__(self, options: dict[str, Any], tiny: bool) -> None:
        given = {"family": "gpt2", "length": 1024, "precision": "bf16", "optimizer": "adamw"}
        self.options = given | options
        self.per_round = 3 if tiny else 8
        self.number = 0
        if tiny:
            size = "tiny" if self.options["family"] == "bert" else "nano"
            self.options |= {"size": size, "batch": 2, "length": 64, "precision": "fp32"}
        self.engines: dict[str, tuple[Any, Callable[[int], Any]]] = {}
        self.compiled: dict[str, Any] = {}
        self.tiny = tiny

    def open(self, variant: Variant) -> None:
        """Open the variant's engine, if it needs one, and run its first steps, which compile."""
        if variant.rebuild or not self.engines:
            self.engines[variant.name] = self._engine({**self.options, **({} if self.tiny else variant.options)})
        self.compiled[variant.name] = compile_copies()
        for _ in range(3):
            self._step(variant)

    def run(self, variant: Variant) -> float:
        """Seconds of a step."""
        self._step(variant)
        start = time.perf_counter()
        for _ in range(self.per_round - 1):
            loss = self._step(variant, wait=False)
        float(loss)
        return (time.perf_counter() - start) / (self.per_round - 1)

    def _step(self, variant: Variant, *, wait: bool = True) -> Any:
        self.number += 1
        engine, step = self.engines.get(variant.name) or next(iter(self.engines.values()))
        engine.compiled = self.compiled[variant.name]
        loss = step(self.number)
        return float(loss) if wait else loss

    def _engine(self, options: dict[str, Any]) -> tuple[Any, Callable[[int], Any]]:
        from engines_gpu import new_step
        from train_gpu import make_batch

        from textmill.config import ModelConfig, TorchEngine, TrainConfig
        from textmill.engines import open_engine
        from textmill.models import initial_weights, open_family

        model = ModelConfig(family=options["family"], size=options["size"])
        vocab = VOCABS.get(options["family"], VOCAB)
        shape: Any = open_family(options["family"]).shape_of(model, vocab=vocab, eos_id=0, length=options["length"])
        shape = shape.with_dropout(0.0)
        train = TrainConfig(
            batch=options["batch"], length=options["length"], learning_rate=1e-4, optimizer=options["optimizer"]
        )
        engine = TorchEngine(
            compile=True,
            micro_batch=options["batch"],
            precision=options["precision"],
            device="cpu" if self.tiny else "auto",
        )
        opened = open_engine(engine, train, shape)
        opened.load(initial_weights(shape, 1), [], 0, "start")
        batch = make_batch(options["batch"], options)
        return opened, new_step(opened, batch)


def compile_copies() -> Any:
    """The net's parts, compiled for one variant only.

    torch's compiler keeps its results by code object, and does not notice replaced methods; so each variant compiles
    copies of the functions that call the parts."""
    base = import_module("textmill.models.base_torch")
    parts = (base._embed_inputs, base._compute, base._final_norm)
    copies = (FunctionType(part.__code__.replace(), part.__globals__, part.__name__) for part in parts)
    return base.CompiledParts(*(torch.compile(copy, dynamic=False) for copy in copies))


# Decoding: the kernels of a step as torch operations, which CUDA graphs can capture too.


def embed(ids_N: Tensor, positions_N: Tensor, tokens_VE: Tensor, positions_TE: Tensor | None = None) -> Tensor:
    """Token and position embeddings."""
    x_NE = F.embedding(ids_N.clamp(min=0), tokens_VE)
    return x_NE if positions_TE is None else x_NE + F.embedding(positions_N, positions_TE)


def add_norm(x_NE: Tensor, delta_NE: Tensor, bias_E: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The residual stream and its norm."""
    x_NE = x_NE + (delta_NE if bias_E is None else delta_NE + bias_E)
    return x_NE, norm(x_NE)


def multiply_gate(both_NF: Tensor, activation: str) -> Tensor:
    """The activated gate times the other half."""
    gate_NF, up_NF = both_NF.chunk(2, -1)
    activate = import_module(LAYERS).ACTIVATIONS[activation]
    out: Tensor = activate(gate_NF) * up_NF
    return out


def attend(
    qkv: Tensor, cache: Tensor, positions_N: Tensor, arrivals: Tensor, angles: Any = None, norms: Any = None
) -> Tensor:
    """Attention of one new token of each text over the entire cache, masked."""
    rows = len(qkv)
    length, key_heads = cache.shape[1:3]
    if qkv.ndim == 4:
        q, k, v = qkv.unbind(2)
    else:
        q, k, v = qkv.split([qkv.shape[1] - 2 * key_heads, key_heads, key_heads], 1)
    if norms:
        q, k = norms[0](q), norms[1](k)
    if angles:
        rotate = import_module("textmill.models.llama.net_torch").apply_rotary
        cos, sin = (table[positions_N][:, None] for table in angles)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    index = torch.arange(rows, device=qkv.device)
    cache[index, positions_N, :, 0] = k
    cache[index, positions_N, :, 1] = v
    keys, values = (cache[:rows, :, :, part].transpose(1, 2) for part in range(2))
    mask = (torch.arange(length, device=qkv.device) <= positions_N[:, None])[:, None, None]
    grouped = q.shape[1] != key_heads
    y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=grouped)
    return y[:, :, 0].flatten(1)


def with_kernels(**replaced: Any) -> Callable[[], Patches]:
    """The kernels of a decoding step with some replaced."""

    def patches() -> Patches:
        captured = import_module("textmill.models.decode_torch")
        own = captured.CapturedSlots.kernels
        kernels = SimpleNamespace(**({} if own is None else vars(own)) | replaced)
        return {"textmill.models.decode_torch:CapturedSlots.kernels": kernels}

    return patches


def no_graphs() -> Patches:
    """The generic slots: the net's own forward pass, without CUDA graphs and kernels for decoding."""
    slots = import_module("textmill.models.decode_torch").NetSlots
    return {"textmill.generation.generator:open_slots": slots}


BETWEEN = {"embed": embed, "add_norm": add_norm, "multiply_gate": multiply_gate}
DECODING = [
    Variant("sampling", lambda: {"textmill.generation.sampling:can_run_kernels": lambda tensor: False}),
    Variant("fused-linear", with_kernels(MAX_FUSED_TEXTS=0)),
    Variant("decode-attention", with_kernels(attend=attend)),
    Variant("kernels-between-matmuls", with_kernels(**BETWEEN)),
    Variant("all-decode-kernels", with_kernels(**BETWEEN, attend=attend, MAX_FUSED_TEXTS=0)),
    Variant("graphs-and-kernels", no_graphs),
]


class DecodingSteps:
    """Steps of a running batch; each variant has a batch of its own."""

    def __init__(self, family: str, count: int, sampled: bool, tiny: bool) -> None:
        from decode_step import open_random_generator

        self.generator = open_random_generator(not tiny, family)
        self.count = count
        self.sampled = sampled
        self.per_round = 10 if tiny else 100
        self.batches: dict[str, Any] = {}
        self.cuda = not tiny

    def open(self, variant: Variant) -> None:
        """Start a batch of texts; the first steps capture CUDA graphs."""
        from decode_step import new_batch

        self.batches[variant.name] = new_batch(self.generator, self.count, self.sampled)
        self._steps(variant, 20)

    def run(self, variant: Variant) -> float:
        """Seconds of a step."""
        return self._steps(variant, self.per_round)

    def _steps(self, variant: Variant, steps: int) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            self.batches[variant.name].step()
        if self.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def settings(tiny: bool) -> dict[str, tuple[Callable[[], Any], list[Variant]]]:
    """Each setting: what opens it, and its variants."""
    found: dict[str, tuple[Callable[[], Any], list[Variant]]] = {}
    for name, (options, variants) in TRAINING.items():
        found[name] = (lambda options=options: TrainingSteps(options, tiny)), variants
    for family in ("gpt2", "llama"):
        for count in (1, 64):
            for sampled in (False, True):
                name = f"decode-{family}-{count}-{'sampled' if sampled else 'greedy'}"
                given = family, count, sampled, tiny
                found[name] = (lambda given=given: DecodingSteps(*given)), DECODING
    return found


@dataclass
class Measured:
    """The rounds of one variant."""

    variant: Variant
    patches: Patches
    seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    compiled: int = 0
    """Graphs that were compiled for it."""


def count_graphs() -> int:
    """Graphs that torch's compiler has compiled in this process."""
    compiler: Any = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def measure(name: str, open_: Callable[[], Any], variants: list[Variant], rounds: int, end: float) -> dict[str, Any]:
    """Run all variants of a setting in turns; return what each gains."""
    cuda = torch.cuda.is_available()
    steps = open_()
    running: list[Measured] = []
    for variant in variants:
        if running and time.monotonic() > end:
            print(f"  {name}/{variant.name}: no time left", flush=True)
            continue
        graphs, start = count_graphs(), time.monotonic()
        try:
            one = Measured(variant, variant.patches())
            with patched(one.patches):
                steps.open(variant)
        except Exception as error:
            print(f"  {name}/{variant.name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            traceback.print_exc(limit=-6)
            if variant.name == "base":
                raise
            continue
        one.compiled = count_graphs() - graphs
        running.append(one)
        print(f"  {name}/{variant.name}: ready after {time.monotonic() - start:.0f} s", flush=True)
    for number in range(rounds):
        for one in list(running):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            try:
                with patched(one.patches):
                    one.seconds.append(steps.run(one.variant))
            except Exception as error:
                print(f"  {name}/{one.variant.name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                running.remove(one)
            one.bytes = torch.cuda.max_memory_allocated() if cuda else 0
        if time.monotonic() > end + 30 and number > 1:
            break
    return report(name, running)


def report(name: str, running: list[Measured]) -> dict[str, Any]:
    """Print a line for each variant."""
    base = statistics.median(running[0].seconds)
    results: dict[str, Any] = {}
    for one in running:
        median = statistics.median(one.seconds)
        # Variants run in turns: the ratio within each round cancels what slows down all of them.
        ratios = [own / first for own, first in zip(one.seconds, running[0].seconds, strict=False)]
        gain = 100 * (statistics.median(ratios) - 1)
        memory = 100 * (one.bytes / running[0].bytes - 1) if running[0].bytes else 0.0
        results[one.variant.name] = {
            "ms": median * 1e3,
            "gain_percent": gain,
            "spread_percent": 100 * (max(ratios) - min(ratios)),
            "memory_gib": one.bytes / 2**30,
            "memory_percent": memory,
            "compiled_graphs": one.compiled,
        }
        line = f"{median * 1e3:9.3f} ms | gain {gain:+6.2f}% (spread {100 * (max(ratios) - min(ratios)):.2f}%)"
        line += f" | {one.bytes / 2**30:6.2f} GiB, {memory:+6.1f}% | {one.compiled} graphs compiled"
        print(f"{name:<24} {one.variant.name:<28} {line if one is not running[0] else f'{median * 1e3:9.3f} ms'}")
    print(f"{name}: base {base * 1e3:.3f} ms", flush=True)
    return results


def choose(only: list[str], tiny: bool) -> dict[str, tuple[Callable[[], Any], list[Variant]]]:
    """The settings and variants that the patterns name, each with its base first."""
    chosen = {}
    for name, (open_, variants) in settings(tiny).items():
        wanted = [
            variant
            for variant in variants
            if not only or any(fnmatchcase(f"{name}/{variant.name}", one if "/" in one else f"{one}/*") for one in only)
        ]
        if wanted:
            chosen[name] = open_, [Variant("base", dict), *wanted]
    return chosen


def main() -> None:
    """Measure the chosen settings, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", default="kernel-gains.json")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=500)
    given = parser.parse_args()
    tiny = given.device == "cpu"
    chosen = choose(given.only, tiny)
    if given.list:
        for name, (_, variants) in chosen.items():
            print(f"{name}: {', '.join(variant.name for variant in variants[1:])}")
        return
    if not tiny and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured (--device cpu tests the script)")
        return
    for limit in ("recompile_limit", "cache_size_limit"):  # one entry for each variant
        if hasattr(torch._dynamo.config, limit):
            setattr(torch._dynamo.config, limit, 64)
    end = time.monotonic() + given.seconds
    print(f"{torch.cuda.get_device_name() if not tiny else 'CPU'}, torch {torch.__version__}", flush=True)
    results: dict[str, Any] = {}
    for name, (open_, variants) in chosen.items():
        if time.monotonic() > end:
            print(f"{name}: no time left", flush=True)
            continue
        try:
            results[name] = measure(name, open_, variants, given.rounds, end)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            traceback.print_exc(limit=-6)
        with open(given.json, "w") as file:
            json.dump(results, file, indent=2)
        gc.collect()
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
