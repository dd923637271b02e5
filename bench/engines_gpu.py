"""Tokens a second of each engine and of a plain jitted step, on one device in one run, a process each.

    python bench/engines_gpu.py [SIZE:BATCH ...] [who=torch,jax,plain,deepspeed,hf] [precision=bf16] [length=1024] [steps=30] [device=auto]

Without sizes: small:64 and medium:32. `plain` is what one writes first in JAX: jit, cuDNN attention if to be had, all logits, optax's
AdamW with clipping. `hf` is transformers' GPT-2 under DeepSpeed as it is, ZeRO-2, fused AdamW. DeepSpeed is measured where it is installed.
On a CPU: nano:2 who=torch,jax,plain precision=fp32 length=64 steps=3.

What to try on a GPU, from the likeliest, by editing the one line each stands on and running this again:
- losses_jax.GPU_ROWS: 16384, 65536; and the scan over pieces unrolled (`unroll=True`), so that no loop stands between two products.
- gpt2_jax._attention: one product for queries, keys and values, cut afterwards, against three.
- gpt2_jax._norm and the GELU without jax.checkpoint: XLA then keeps more and computes less.
- gpt2_jax.states: the blocks as a lax.scan over stacked weights: compiles faster, and was never seen to run faster.
- embeddings looked up in bf16: the scatter of their gradient is then half as wide.
- XLA_FLAGS: --xla_gpu_enable_latency_hiding_scheduler=true, --xla_gpu_enable_triton_gemm=false, --xla_gpu_autotune_level=4,
  --xla_gpu_enable_command_buffer= (empty: no CUDA graphs), XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.
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

from textmill.config import JaxEngine, ModelConfig, RunConfig, TorchEngine, TrainConfig
from textmill.config.engines import DeepSpeedEngine
from textmill.devices import peak_flops_by_name
from textmill.engines import Engine, open_engine
from textmill.models import initial_weights, open_family
from textmill.tokens.batches.batch import Batch

VOCAB = 50257
OPTIONS: dict[str, Any] = {
    "who": "torch,jax,plain,deepspeed,hf",
    "precision": "bf16",
    "length": 1024,
    "steps": 30,
    "device": "auto",
}
NEEDED = {"plain": "jax", "hf": "deepspeed"}
"""The package that one of them needs, where its name is another."""


def measured(step: Callable[[int], Any], steps: int) -> tuple[float, float, float]:
    """Seconds of the first step, which compiles, of one after it, and the last loss; a loss is waited for when it is read."""
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


def batch_of(batch: int, length: int) -> Batch:
    """Random tokens."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (batch, length + 1), dtype=np.int32)
    return Batch(ids[:, :-1], ids[:, 1:], np.arange(batch))


def losses_of(engine: Engine, batch: Batch) -> Callable[[int], Any]:
    """Steps of an engine over one batch, each a loss."""

    class Loss:
        def __init__(self, number: int) -> None:
            self.step = engine.train_step(batch, number, 1e-4)

        def __float__(self) -> float:
            return self.step.loss

    return Loss


def engines_step(
    kind: str, shape: Any, size: str, batch: int, options: dict[str, Any]
) -> tuple[Callable[[int], Any], str]:
    """A step of one of our engines, and the device it stands on."""
    train = TrainConfig(batch=batch, length=options["length"], learning_rate=1e-4)
    common = {"micro_batch": batch, "precision": options["precision"], "device": options["device"]}
    on_gpu = {"compile": True} if kind == "torch" and options["device"] != "cpu" else {}
    section: Any = {"torch": TorchEngine, "jax": JaxEngine, "deepspeed": DeepSpeedEngine}[kind]
    engine = open_engine(
        RunConfig(model=ModelConfig(size=size), train=train, engine=section(**common, **on_gpu)), shape
    )
    engine.load(initial_weights(shape, 1), [], 0, "start")
    return losses_of(engine, batch_of(batch, options["length"])), engine.facts()["device"]


def plain_step(shape: Any, batch: int, options: dict[str, Any]) -> tuple[Callable[[int], Any], str]:
    """A step as one writes it first: no fused loss, no care for what is kept."""
    import jax
    import jax.numpy as jnp
    import optax

    if options["device"] == "cpu":
        jax.config.update("jax_platforms", "cpu")
    device, dtype = jax.devices()[0], jnp.dtype({"bf16": jnp.bfloat16, "fp32": jnp.float32}[options["precision"]])
    kernel = "cudnn" if device.platform == "gpu" and options["precision"] == "bf16" else "xla"
    weights = {name: jnp.asarray(values) for name, values in initial_weights(shape, 1)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, 0.9, 0.95, weight_decay=0.1))
    batch_ = batch_of(batch, options["length"])

    def norm(w: Any, name: str, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        wide = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
        return (wide * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(dtype)

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[f"{name}.weight"].astype(dtype) + w[f"{name}.bias"].astype(dtype)

    def loss_of(w: Any, ids: Any, labels: Any) -> Any:
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
        loss, grads = jax.value_and_grad(loss_of)(w, ids, labels)
        steps, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, steps), state, loss

    held: list[Any] = [weights, optimizer.init(weights)]

    def step(number: int) -> Any:
        held[0], held[1], loss = update(*held, batch_.inputs, batch_.labels)
        return loss

    return step, device.device_kind


def hf_step(shape: Any, batch: int, options: dict[str, Any]) -> tuple[Callable[[int], Any], str]:
    """A step of transformers' model under DeepSpeed, in a process group of one."""
    import deepspeed
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29577"}
    os.environ.update(alone)
    net = GPT2LMHeadModel(GPT2Config(**open_family("gpt2").hf_config_of(shape)))
    told = {
        "train_batch_size": batch, "train_micro_batch_size_per_gpu": batch, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        **({"bf16": {"enabled": True}} if options["precision"] == "bf16" else {}),
    }  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=told)
    ids = torch.from_numpy(batch_of(batch, options["length"]).inputs).long().to(engine.device)

    def step(number: int) -> Any:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step, torch.cuda.get_device_name()


def one(who: str, size: str, batch: int, options: dict[str, Any]) -> dict[str, Any]:
    """What one of them gives, in this process."""
    shape = open_family("gpt2").shape_of(ModelConfig(size=size), vocab=VOCAB, end=0, length=options["length"])
    peers = {"plain": plain_step, "hf": hf_step}
    step, card = peers[who](shape, batch, options) if who in peers else engines_step(who, shape, size, batch, options)
    first, each, loss = measured(step, options["steps"])
    rate, peak = batch * options["length"] / each, peak_flops_by_name(card)
    share = rate * shape.flops_per_token(options["length"]) / peak if peak else None
    return {"card": card, "rate": rate, "share": share, "first": first, "loss": loss}


def main(words: list[str]) -> None:
    """Measure every size asked for, each engine in a process of its own, and print a line each."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    options = {key: type(value)(given.get(key, value)) for key, value in OPTIONS.items()}
    asked = [name for name in options["who"].split(",") if importlib.util.find_spec(NEEDED.get(name, name))]
    for word in [word for word in words if "=" not in word] or ["small:64", "medium:32"]:
        size, _, number = word.partition(":")
        found: dict[str, dict[str, Any]] = {}
        for who in asked:
            told = json.dumps({"who": who, "size": size, "batch": int(number or 32), "options": options})
            done = subprocess.run([sys.executable, __file__, "--one", told], capture_output=True, text=True)
            if done.returncode:
                print(f"{who}: {done.stderr[-2000:]}", flush=True)
                continue
            found[who] = result = json.loads(done.stdout.splitlines()[-1])
            share = f"{result['share']:.1%} MFU" if result["share"] else result["card"]
            ratios = ", ".join(
                f"{result['rate'] / peer['rate']:.2f} of {name}" for name, peer in found.items() if name != who
            )
            line = f"{who} | {result['rate']:,.0f} tokens/s | {share} | first step {result['first']:.1f} s | loss {result['loss']:.4f}"
            print(f"{size} {number} x {options['length']} {options['precision']} | {line} | {ratios}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(**json.loads(sys.argv[2]))))
    else:
        main(sys.argv[1:])
