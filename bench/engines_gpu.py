"""Tokens/s of each engine and of a plain jitted step, on one device in one run, each in its own process.

    python bench/engines_gpu.py [SIZE:BATCH ...] [engines=torch,jax,plain,deepspeed,hf] [precision=bf16]
                                [length=1024] [steps=30] [device=auto]

The default sizes are small:64 and medium:32. `plain` is a first version in JAX: jit, cuDNN attention if available, all
logits at once, optax's AdamW with clipping. `hf` is transformers' GPT-2 under DeepSpeed, ZeRO-2, fused AdamW. DeepSpeed
is measured if it is installed. On a CPU: nano:2 engines=torch,jax,plain precision=fp32 length=64 steps=3.

What to try on a GPU, most promising first; each is a change of one line:
- losses_jax.GPU_TOKENS: 16384, 65536; and the scan over chunks unrolled (`unroll=True`), so that no loop separates two
  matmuls.
- net_jax._attention: one matmul for queries, keys and values, split afterwards, instead of three.
- net_jax._norm and the GELU without jax.checkpoint: XLA then stores more and computes less.
- net_jax.states: the blocks as a lax.scan over stacked weights: compiles faster, has not run faster so far.
- embedding lookup in bf16: the scatter of its gradient is then half as large.
- XLA_FLAGS: --xla_gpu_enable_latency_hiding_scheduler=true, --xla_gpu_enable_triton_gemm=false,
  --xla_gpu_autotune_level=4, --xla_gpu_enable_command_buffer= (empty: no CUDA graphs),
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from textmill.config import JaxEngine, ModelConfig, TorchEngine, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import peak_flops_by_name
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch
from textmill.verification.launcher import free_port

VOCAB = 50257
OPTIONS: dict[str, Any] = {
    "engines": "torch,jax,plain,deepspeed,hf",
    "precision": "bf16",
    "length": 1024,
    "steps": 30,
    "device": "auto",
}
NEEDED = {"plain": "jax", "hf": "deepspeed"}
"""The package that each of them needs, if it is not named like it."""


def measure_steps(step: Callable[[int], Any], steps: int) -> tuple[float, float, float]:
    """Return the seconds of the first step (which compiles) and of a later one, and the last loss.

    Reading a loss waits for the device.
    """
    start = time.perf_counter()
    float(step(0))
    first = time.perf_counter() - start
    for number in range(1, 6):
        loss = step(number)
    float(loss)
    start = time.perf_counter()
    for number in range(steps):
        loss = step(number)
    last = float(loss)
    return first, (time.perf_counter() - start) / steps, last


def random_batch(batch: int, length: int) -> Batch:
    """Return a batch of random tokens."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (batch, length + 1), dtype=np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(batch))


def new_step(engine: Engine, batch: Batch) -> Callable[[int], Any]:
    """Return a function that runs a step of an engine on this batch and returns its loss, not yet computed."""

    class Loss:
        def __init__(self, number: int) -> None:
            self.step = engine.train_step(batch, number, 1e-4)

        def __float__(self) -> float:
            return self.step.loss

    return Loss


def open_engine_step(
    kind: str, shape: Any, size: str, batch: int, options: dict[str, Any]
) -> tuple[Callable[[int], Any], str]:
    """Return the step of one of our engines, and its device."""
    train = TrainConfig(batch=batch, length=options["length"], learning_rate=1e-4)
    common = {"micro_batch": batch, "precision": options["precision"], "device": options["device"]}
    on_gpu = {"compile": True} if kind == "torch" and options["device"] != "cpu" else {}
    section: Any = {"torch": TorchEngine, "jax": JaxEngine, "deepspeed": DeepSpeedEngine}[kind]
    engine = open_engine(section(**common, **on_gpu), train, shape)
    engine.load(initial_weights(shape, 1), [], 0, "start")
    return new_step(engine, random_batch(batch, options["length"])), engine.describe()["device"]


def open_plain_step(shape: Any, batch: int, options: dict[str, Any]) -> tuple[Callable[[int], Any], str]:
    """Return the step of a first version in JAX: no fused loss, no activation checkpointing."""
    import jax
    import jax.numpy as jnp
    import optax

    if options["device"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device, dtype = jax.devices()[0], jnp.dtype({"bf16": jnp.bfloat16, "fp32": jnp.float32}[options["precision"]])
    kernel = "cudnn" if device.platform == "gpu" and options["precision"] == "bf16" else "xla"
    weights = {name: jnp.asarray(values) for name, values in initial_weights(shape, 1)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, 0.9, 0.95, weight_decay=0.1))
    batch_ = random_batch(batch, options["length"])

    def norm(w: Any, name: str, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return (wide * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(dtype)

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"].astype(dtype) + w[f"{name}.bias"].astype(dtype)

    def compute_loss(w: Any, ids: Any, labels: Any) -> Any:
        (N, T), wte = ids.shape, w["transformer.wte.weight"]
        x = (wte[ids] + w["transformer.wpe.weight"][:T]).astype(dtype)
        for layer in range(shape.layers):
            h = f"transformer.h.{layer}"
            qkv = linear(w, f"{h}.attn.c_attn", norm(w, f"{h}.ln_1", x)).reshape(N, T, 3, shape.heads, -1)
            y = jax.nn.dot_product_attention(
                *(qkv[:, :, part] for part in range(3)), is_causal=True, implementation=kernel
            )
            x = x + linear(w, f"{h}.attn.c_proj", y.reshape(N, T, -1))
            x = x + linear(w, f"{h}.mlp.c_proj", jax.nn.gelu(linear(w, f"{h}.mlp.c_fc", norm(w, f"{h}.ln_2", x))))
        logits = norm(w, "transformer.ln_f", x) @ wte.T.astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    @jax.jit
    def update(w: Any, state: Any, ids: Any, labels: Any) -> Any:
        loss, grads = jax.value_and_grad(compute_loss)(w, ids, labels)
        steps, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, steps), state, loss

    current: list[Any] = [weights, optimizer.init(weights)]

    def step(number: int) -> Any:
        current[0], current[1], loss = update(*current, batch_.inputs, batch_.labels)
        return loss

    return step, device.device_kind


def open_hf_step(shape: Any, batch: int, options: dict[str, Any]) -> tuple[Callable[[int], Any], str]:
    """Return a step of transformers' model under DeepSpeed, in a process group of one."""
    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({**one_rank, "MASTER_PORT": str(free_port())})
    net = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(shape)))
    config = {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": batch,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if options["precision"] == "bf16" else {}),
    }
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    ids = torch.from_numpy(random_batch(batch, options["length"]).inputs).long().to(engine.device)

    def step(number: int) -> Any:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, torch.cuda.get_device_name()


def measure_engine(name: str, size: str, batch: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the results of one engine, measured in this process."""
    shape = open_family("gpt2").shape_of(ModelConfig(size=size), vocab=VOCAB, eos_id=0, length=options["length"])
    others = {"plain": open_plain_step, "hf": open_hf_step}
    if name in others:
        step, device = others[name](shape, batch, options)
    else:
        step, device = open_engine_step(name, shape, size, batch, options)
    first, each, loss = measure_steps(step, options["steps"])
    rate, peak = batch * options["length"] / each, peak_flops_by_name(device)
    mfu = rate * shape.flops_per_token(options["length"]) / peak if peak else None
    return {"device": device, "rate": rate, "mfu": mfu, "first": first, "loss": loss}


def read_options(arguments: list[str], defaults: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the SIZE:BATCH arguments and the options, which have the types of their defaults."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if unknown := given.keys() - defaults.keys():
        raise SystemExit(f"unknown option {', '.join(sorted(unknown))}; use {', '.join(defaults)}")
    sizes = [argument for argument in arguments if "=" not in argument] or ["small:64", "medium:32"]
    return sizes, {key: type(value)(given.get(key, value)) for key, value in defaults.items()}


def main(arguments: list[str]) -> None:
    """Measure every size, each engine in its own process, and print a line for each."""
    sizes, options = read_options(arguments, OPTIONS)
    names = [name for name in options["engines"].split(",") if importlib.util.find_spec(NEEDED.get(name, name))]
    for argument in sizes:
        size, _, number = argument.partition(":")
        results: dict[str, dict[str, Any]] = {}
        for name in names:
            task = json.dumps({"name": name, "size": size, "batch": int(number or 32), "options": options})
            done = subprocess.run([sys.executable, __file__, "--one", task], capture_output=True, text=True)
            if done.returncode:
                print(f"{name}: {done.stderr[-2000:]}", flush=True)
                continue
            results[name] = result = json.loads(done.stdout.splitlines()[-1])
            mfu = f"{result['mfu']:.1%} MFU" if result["mfu"] else result["device"]
            ratios = ", ".join(
                f"{result['rate'] / other['rate']:.2f} of {key}" for key, other in results.items() if key != name
            )
            line = f"{name} | {result['rate']:,.0f} tokens/s | {mfu}"
            line += f" | first step {result['first']:.1f} s | loss {result['loss']:.4f} | {ratios}"
            print(f"{size} {number} x {options['length']} {options['precision']} | {line}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measure_engine(**json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1:])
