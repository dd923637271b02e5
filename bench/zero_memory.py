"""Memory per process in each ZeRO stage, compared with ZeRO-0: two processes on this machine, GPT-2 in fp32, two steps.

    python bench/zero_memory.py [SIZE]      (default: small, 124M parameters, about 5 GB at most)

Peak: the most memory of a process in addition to what it had before the engine was opened, with the activations of one
sample of 32 tokens. Held: the tensors that exist between two steps, each counted once.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

LENGTH, PROCESSES = 32, 2


def tensor_bytes() -> int:
    """Return the bytes of all tensors; shared memory counts once."""
    import torch

    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure(size: str, zero: int, path: Path) -> None:
    """Train two steps in one of the launched processes, and write the memory of all of them."""
    import numpy as np

    from textmill.config import ModelConfig, RunConfig, TrainConfig
    from textmill.config.engines import DeepSpeedEngine
    from textmill.engines import open_engine, open_ranks
    from textmill.models import initial_weights, open_family
    from textmill.tokens.batches.batch import Batch

    engine_section = DeepSpeedEngine(device="cpu", zero=zero, micro_batch=1)  # type: ignore[arg-type]
    train = TrainConfig(batch=PROCESSES, length=LENGTH)
    config = RunConfig(model=ModelConfig(size=size), train=train, engine=engine_section)
    shape = open_family("gpt2").shape_of(config.model, vocab=50257, eos_id=0)
    import deepspeed  # noqa: F401

    with closing(open_ranks(config.engine)) as ranks:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with closing(open_engine(config.engine, config.train, shape, config.model.lora, ranks)) as engine:
            engine.load(initial_weights(shape, 1), [], 0, "the first weights")
            for step in range(2):
                ids = np.random.default_rng(step).integers(0, 50257, (1, LENGTH + 1), dtype=np.int32)
                engine.train_step(Batch(ids[:, :-1], ids[:, 1:], np.array([step])), step, 1e-4)
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            found = ranks.all_gather({"peak": peak * 1024, "held": tensor_bytes()})
        if ranks.first:
            path.write_text(json.dumps(found))


def main() -> None:
    """Launch each stage in new processes, so that peaks are independent; then print the table."""
    size = sys.argv[1] if len(sys.argv) > 1 else "small"
    rows = {}
    for zero in (0, 1, 2, 3):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={PROCESSES}",
                __file__,
                "in",
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
            done = subprocess.run(
                [*command, size, str(zero), str(path)], env=environment, capture_output=True, text=True
            )
            if done.returncode:
                raise SystemExit(done.stderr[-3000:])
            rows[zero] = json.loads(path.read_text())
    most = {zero: {key: max(one[key] for one in found) for key in ("peak", "held")} for zero, found in rows.items()}
    print(
        f"GPT-2 {size}, fp32, {PROCESSES} processes; the process with the most memory, in MB, and its ratio to ZeRO-0"
    )
    for zero, values in most.items():
        columns = [f"{key} {value / 1e6:7.0f} ({value / most[0][key]:.2f})" for key, value in values.items()]
        print(f"ZeRO-{zero}   {'   '.join(columns)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["in"]:
        measure(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    else:
        main()
