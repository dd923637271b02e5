"""Probe the machine: the operations per second that two small nets reach in training, memory and cores."""

from __future__ import annotations

import math
import os
import time

import numpy as np

from textmill.config import ModelConfig, ShapeConfig, TorchEngine, TrainConfig
from textmill.devices import measure_matmul, memory_of, name_of, open_device
from textmill.engines import open_engine
from textmill.models import initial_weights, open_family
from textmill.planning.plan import MachineProfile
from textmill.runners.on_local import usable_cores
from textmill.tokens.batches.batch import Batch

PROBED = ((2, 64), (4, 192))
"""Layers and width of the two nets that are trained for some steps on a CPU."""
VOCAB = 1024
LENGTH = 64
ROWS = 16
BUSY = 1.5
"""A machine with more running processes than this for each core is too busy to be measured by the clock."""
USED_CORES = 1.5
"""Cores that such small nets use on an idle machine with more than one."""
PROBE_SECONDS = 1.5
"""For each net, after its first step."""
GPU_SMALL = 7_500_000
GPU_LARGE = 124_000_000
"""Parameters of the nets whose speed on a GPU is known relative to that of large matmuls."""
GPU_SMALL_FRACTION = 0.25
GPU_LARGE_FRACTION = 0.57
"""Of the speed of large matmuls, reached in training by compiled nets of these sizes (docs/autopilot.md); a net is not
trained on a GPU for the probe, since it would be compiled first."""
STARTUP_SECONDS = {"cpu": 8.0, "cuda": 28.0}
"""Imports, saving and the last evaluation."""


def probe_machine() -> MachineProfile:
    """Measure for a few seconds."""
    device = open_device("auto")
    kind = "cuda" if device.type == "cuda" else "cpu"
    if kind == "cuda":
        rate = measure_matmul(device)
        rates = (GPU_SMALL, GPU_SMALL_FRACTION * rate), (GPU_LARGE, GPU_LARGE_FRACTION * rate)
    else:
        small, large = (_train_rate(layers, width) for layers, width in PROBED)
        rates = small, large
    return MachineProfile(kind, name_of(device), usable_cores(), memory_of(device), rates, STARTUP_SECONDS[kind])


def running_processes() -> float:
    """The mean number of the last minute; in a container with some of the cores still that of all of them."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _train_rate(layers: int, width: int) -> tuple[int, float]:
    """Parameters of a net, and the operations per second of its training steps."""
    model = ModelConfig(shape=ShapeConfig(layers=layers, width=width, heads=width // 32, positions=LENGTH))
    shape = open_family("gpt2").shape_of(model, vocab=VOCAB, eos_id=0)
    train = TrainConfig(batch=ROWS, length=LENGTH, optimizer="muon")
    engine = open_engine(TorchEngine(device="cpu"), train, shape)
    engine.load(initial_weights(shape, 0), [], 0, "a probe")
    random = np.random.default_rng(0)
    ids = random.integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    batch = Batch(ids[:, :-1], ids[:, 1:], np.arange(ROWS))
    _ = engine.train_step(batch, 0, 1e-3).loss
    end = time.perf_counter() + PROBE_SECONDS
    busy = running_processes() > BUSY * max(usable_cores(), os.cpu_count() or 1)
    seconds = math.inf
    while (began := time.perf_counter()) < end:
        cpu_began = time.process_time()
        _ = engine.train_step(batch, 1, 1e-3).loss
        seconds = min(seconds, time.perf_counter() - began)  # other programs only make a step slower
        if busy:  # and hardly change its CPU time
            seconds = min(seconds, (time.process_time() - cpu_began) / min(usable_cores(), USED_CORES))
    engine.close()
    parameters = 12 * layers * width**2 + width * VOCAB
    return parameters, 6.0 * parameters * ROWS * LENGTH / seconds
