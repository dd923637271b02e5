"""Verify correct configs of every kind: none may be called wrong, and each has a minute on 2 cores.

python bench/verify_configs.py [word ...]     words choose configs by name
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
    "copies, accumulated": "engine.mesh.replicate=2 train.batch=24 engine.micro_batch=4",
    "4 copies, smoothed": "engine.mesh.replicate=4 train.label_smoothing=0.1 train.z_loss=1e-4",
    "shards": "engine.mesh.shard=2 model.shape.dropout=0.2",
    "4 shards, recomputed": "engine.mesh.shard=4 engine.recompute=2",
    "shards kept, sample means": "engine.mesh.shard=2 engine.mesh.keep_gathered=true train.loss=sample_mean",
    "tensor and sequence": "engine.mesh.tensor=2 train.batch=8",
    "tensor without sequence": "engine.mesh.tensor=2 engine.mesh.sequence_parallel=false engine.recompute=1",
    "4 tensor peers": "engine.mesh.tensor=4 engine.precision=fp32",
    "copies of shards": "engine.mesh.replicate=2 engine.mesh.shard=2 train.batch_rampup=8,8,1000 train.batch=32",
    "copies of tensor peers": "engine.mesh.replicate=2 engine.mesh.tensor=2 engine.precision=fp32",
    "shards of tensor peers": "engine.mesh.shard=2 engine.mesh.tensor=2 engine.recompute=1",
    "muon in shards": "engine.mesh.shard=2 train.optimizer=muon",
    "frozen, layer by layer": "engine.mesh.shard=2 train.freeze=wte,wpe,h.0 train.layer_decay=0.8",
    "documents apart": "engine.mesh.tensor=2 train.packed.isolate_documents=true train.clip=0",
    "padded, fp16": "engine.mesh.replicate=2 train.layout=padded engine.precision=fp16",
    "adapters": "model.lora.rank=4 model.init_from={model} engine.mesh.shard=2",
    "zero 0": "engine.kind=deepspeed engine.zero=0",
    "zero 1": "engine.kind=deepspeed engine.zero=1 train.loss=sample_mean",
    "zero 2": "engine.kind=deepspeed engine.zero=2 train.batch=24 engine.micro_batch=4",
    "zero 3": "engine.kind=deepspeed engine.zero=3 engine.recompute=1",
    "jax copies": "engine.kind=jax engine.mesh.replicate=2 train.loss=sample_mean",
    "jax shards": "engine.kind=jax engine.mesh.shard=2 engine.recompute=1",
    "jax tensor": "engine.kind=jax engine.mesh.tensor=2",
    "jax shards of tensor peers": "engine.kind=jax engine.mesh.shard=2 engine.mesh.tensor=2 train.optimizer=muon",
}
"""What is said beside the quickstart recipe: a mesh of each kind, and what goes with it."""


def given_model(folder: Path) -> Path:
    """Weights to lay adapters on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=4, n_head=4)).save_pretrained(folder)
    return folder


def verified(words: str) -> tuple[int, float, float, str]:
    """The exit code of verify on a config, its seconds, those of all its processes' work, and what it said."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    shape = [] if "init_from" in words else SHAPE.split()
    adamw = ["train.optimizer=adamw", "train.learning_rate=3e-3"]  # DeepSpeed does not take the recipe's
    done = subprocess.run([*COMMAND, "quickstart", *adamw, *shape, *words.split()], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    work = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.returncode, time.monotonic() - began, work, done.stdout + done.stderr


def main(*chosen: str) -> int:
    """The campaign; its figures go to docs/parallel.md."""
    seconds, alarms = [], []
    with tempfile.TemporaryDirectory() as folder:
        model = given_model(Path(folder))
        names = [name for name in CONFIGS if not chosen or any(word in name for word in chosen)]
        for name in names:
            code, took, work, said = verified(CONFIGS[name].format(model=model))
            print(
                f"{name:<28} exit {code}  {took:5.1f} s, {work:5.1f} s of work, {said.count(' equal ')} comparisons hold",
                flush=True,
            )
            seconds.append(work)
            if code:
                alarms.append(name)
                print(said, flush=True)
    print(
        f"{len(names)} configs, {len(alarms)} alarms; at most {max(seconds):.1f} s of work, {sum(seconds) / len(seconds):.1f} s on average"
    )
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
