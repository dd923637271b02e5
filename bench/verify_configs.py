"""Verify correct configs of every kind: none may be reported as wrong, and each may take a minute on 2 cores.

python bench/verify_configs.py [TEXT ...]     only configs whose name has one of these texts
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-c", "import sys; from textmill.cli import main; sys.exit(main())", "verify"]
SHAPE = "model.shape.heads=4 model.shape.width=64 model.shape.layers=4 train.length=64"
CONFIGS = {
    "replicas, accumulated": "engine.mesh.replicate=2 train.batch=24 engine.micro_batch=4",
    "4 replicas, smoothed": "engine.mesh.replicate=4 train.label_smoothing=0.1",
    "shards": "engine.mesh.shard=2 model.shape.dropout=0.2",
    "4 shards, recomputed": "engine.mesh.shard=4 engine.activation_checkpointing=2",
    "shards kept, sample means": "engine.mesh.shard=2 engine.mesh.keep_gathered=true train.loss=sample_mean",
    "tensor and sequence": "engine.mesh.tensor=2 train.batch=8",
    "tensor without sequence": "engine.mesh.tensor=2 engine.mesh.sequence_parallel=false "
    "engine.activation_checkpointing=1",
    "4 tensor ranks": "engine.mesh.tensor=4 engine.precision=fp32",
    "replicas of shards": "engine.mesh.replicate=2 engine.mesh.shard=2 train.batch_rampup=8,8,1000 train.batch=32",
    "replicas of tensor ranks": "engine.mesh.replicate=2 engine.mesh.tensor=2 engine.precision=fp32",
    "shards of tensor ranks": "engine.mesh.shard=2 engine.mesh.tensor=2 engine.activation_checkpointing=1",
    "muon in shards": "engine.mesh.shard=2 train.optimizer=muon",
    "frozen, layer by layer": "engine.mesh.shard=2 train.freeze=wte,wpe,h.0 train.layer_decay=0.8",
    "isolated documents": "engine.mesh.tensor=2 train.packed.isolate_documents=true train.clip=0",
    "padded, fp16": "engine.mesh.replicate=2 train.layout=padded engine.precision=fp16",
    "adapters": "model.lora.rank=4 model.init_from={model} engine.mesh.shard=2",
    "zero 0": "engine.kind=deepspeed engine.zero=0",
    "zero 1": "engine.kind=deepspeed engine.zero=1 train.loss=sample_mean",
    "zero 2": "engine.kind=deepspeed engine.zero=2 train.batch=24 engine.micro_batch=4",
    "zero 3": "engine.kind=deepspeed engine.zero=3 engine.activation_checkpointing=1",
    "jax replicas": "engine.kind=jax engine.mesh.replicate=2 train.loss=sample_mean",
    "jax shards": "engine.kind=jax engine.mesh.shard=2 engine.activation_checkpointing=1",
    "jax tensor": "engine.kind=jax engine.mesh.tensor=2",
    "jax shards of tensor ranks": "engine.kind=jax engine.mesh.shard=2 engine.mesh.tensor=2 train.optimizer=muon",
}
"""Settings that override the quickstart recipe: a mesh of each kind, with other settings."""


def write_model(folder: Path) -> Path:
    """Write weights to train adapters on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=4, n_head=4)).save_pretrained(folder)
    return folder


def run_verify(settings: str) -> tuple[int, float, float, str]:
    """Run verify on a config; return exit code, seconds, CPU seconds of all its processes, and output."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    shape = [] if "init_from" in settings else SHAPE.split()
    adamw = ["train.optimizer=adamw", "train.learning_rate=3e-3"]  # DeepSpeed does not support the recipe's Muon
    done = subprocess.run([*COMMAND, "quickstart", *adamw, *shape, *settings.split()], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, time.monotonic() - started, cpu, done.stdout + done.stderr


def main(*chosen: str) -> int:
    """Run the campaign; its results go to docs/parallel.md."""
    seconds, alarms = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        names = [name for name in CONFIGS if not chosen or any(part in name for part in chosen)]
        for name in names:
            code, wall, cpu, output = run_verify(CONFIGS[name].format(model=model))
            print(
                f"{name:<28} exit {code}  {wall:5.1f} s, {cpu:5.1f} s of CPU, "
                f"{output.count(' equal ')} comparisons equal",
                flush=True,
            )
            seconds.append(cpu)
            if code:
                alarms.append(name)
                print(output, flush=True)
    print(
        f"{len(names)} configs, {len(alarms)} false alarms; at most {max(seconds):.1f} s of CPU, "
        f"{sum(seconds) / len(seconds):.1f} s on average"
    )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
