"""Compare 20 steps on meshes of CPU processes with those of one process: losses, gradient norms, first gradients.

    python bench/meshes.py FAMILY:AXIS=SIZE,... ...
    python bench/meshes.py gpt2:pipeline=2,tensor=2,replicate=2 llama:pipeline=2,shard=2,schedule=interleaved

The net, the batches and the processes are those of tests/engines/test_layouts.py: dropout, samples of unequal length,
isolated documents, gradient accumulation; of BERT packed sentence pairs. Prints the largest relative differences.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.layout_process import config_of, started, stepped
from tests.support.together import run_together
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


def main(words: list[str]) -> None:
    """Launch the processes of each mesh and compare."""
    for word in words:
        family, _, axes = word.partition(":")
        mesh = {
            name: int(size) if size.isdigit() else size
            for name, _, size in (one.partition("=") for one in axes.split(","))
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.npz"
            world = int(np.prod([size for size in mesh.values() if isinstance(size, int)]))
            launched = run_together([sys.executable, __file__, "--rank", family, json.dumps(mesh), str(path)], world)
            if launched != "ok":
                sys.exit(launched)
            found = dict(np.load(path))
        loss, norm, gradient = worst(found, measure(config_of({}, family, blocks_for(mesh), clip=0.0)))
        print(f"{word}: losses {loss:.1e}, norms {norm:.1e}, gradients {gradient:.1e}", flush=True)


def run_rank(family: str, mesh: str, path: str) -> None:
    """One process of a mesh; the first writes what it found."""
    config = config_of(json.loads(mesh), family, blocks_for(json.loads(mesh)), clip=0.0)
    with closing(open_ranks(config.engine)) as ranks:
        found = measure(config, ranks)
        if ranks.first:
            np.savez(path, **found)


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_rank(*sys.argv[2:])
    else:
        main(sys.argv[1:])
