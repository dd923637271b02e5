"""Compare 20 steps on meshes of CPU processes with those of one process: losses, gradient norms, first gradients.

    python bench/meshes.py FAMILY:AXIS=SIZE,... ...
    python bench/meshes.py gpt2:pipeline=2,tensor=2,replicate=2 llama:pipeline=2,shard=2,schedule=interleaved
    python bench/meshes.py --cuda gpt2:shard=2,precision=bf16,compile=True

The net, the batches and the processes are those of tests/engines/test_layouts.py: dropout, samples of unequal length,
isolated documents, gradient accumulation; of BERT packed sentence pairs. Prints the largest relative differences.
With --cuda all processes share the first GPU over gloo, and the one process to compare with is on that GPU too, not
compiled; `precision` and `compile` then belong to the mesh.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.support.compiled_process import share_the_card
from tests.support.layout_process import config_of, started, stepped
from tests.support.together import run_together
from textmill.config import RunConfig
from textmill.config.engines import MeshConfig
from textmill.engines import open_ranks

STEPS = 20


def blocks_for(mesh: dict[str, Any]) -> int:
    """A block for each group of blocks of each pipeline stage, and at least two."""
    return max(2, mesh.get("pipeline", 1) * (2 if mesh.get("schedule") == "interleaved" else 1))


def measure(config: Any, ranks: Any = None) -> dict[str, Any]:
    """Losses, norms, and the gradients of the first step by the name of their weight."""
    engine = started(config, ranks)
    steps = stepped(engine, range(1), config.model.family)
    gradients = {name: values / 0.1 for name, values in engine.optimizer_state() if name.startswith("m/")}
    steps += stepped(engine, range(1, STEPS), config.model.family)
    return {"losses": [loss for loss, _ in steps], "norms": [norm for _, norm in steps], **gradients}


def worst(found: dict[str, Any], wanted: dict[str, Any]) -> tuple[float, float, float]:
    """The largest differences: of a loss and of a norm to itself, of a gradient to the norm of all."""
    loss, norm = (float(np.max(np.abs(found[name] / np.array(wanted[name]) - 1))) for name in ("losses", "norms"))
    names = wanted.keys() - {"losses", "norms"}
    gradient = max(float(np.abs(found[name] - wanted[name]).max()) for name in names) / wanted["norms"][0]
    return loss, norm, gradient


def config_for(family: str, given: dict[str, Any], device: str, *, alone: bool = False) -> RunConfig:
    """The config of a mesh, or that of the one process which it is compared with."""
    mesh = {name: value for name, value in given.items() if name in MeshConfig.model_fields}
    config = config_of({} if alone else mesh, family, blocks_for(mesh), clip=0.0)
    settings = {name: value for name, value in given.items() if name not in mesh and not (alone and name == "compile")}
    engine = config.engine.model_copy(update={"device": device, **settings})
    return config.model_copy(update={"engine": engine})


def main(device: str, words: list[str]) -> None:
    """Launch the processes of each mesh and compare."""
    failed = False
    for word in words:
        family, _, axes = word.partition(":")
        given = {name: yaml.safe_load(value) for name, _, value in (one.partition("=") for one in axes.split(","))}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.npz"
            world = int(np.prod([given.get(name, 1) for name in ("replicate", "shard", "tensor", "pipeline")]))
            command = [sys.executable, __file__, "--rank", family, json.dumps(given), device, str(path)]
            if (launched := run_together(command, world)) != "ok":
                print(f"{word}: {launched}", flush=True)
                failed = True
                continue
            found = dict(np.load(path))
        loss, norm, gradient = worst(found, measure(config_for(family, given, device, alone=True)))
        print(f"{word}: losses {loss:.1e}, norms {norm:.1e}, gradients {gradient:.1e}", flush=True)
    if failed:
        sys.exit(1)


def run_rank(family: str, given: str, device: str, path: str) -> None:
    """One process of a mesh; the first writes what it found."""
    config = config_for(family, json.loads(given), device)
    if device == "cuda":
        share_the_card()
    with closing(open_ranks(config.engine)) as ranks:
        found = measure(config, ranks)
        if ranks.first:
            np.savez(path, **found)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_rank(*sys.argv[2:])
    elif sys.argv[1] == "--cuda":
        main("cuda", sys.argv[2:])
    else:
        main("cpu", sys.argv[1:])
