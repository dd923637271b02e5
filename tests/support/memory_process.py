"""One rank in the tests of the memory estimate: memory_process.py FOLDER writes the bytes that each layout holds."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.layout_process import config_of, started, stepped
from textmill.config import RunConfig
from textmill.engines import open_ranks
from textmill.engines.optimizers.muon_torch import ShardedMuon
from textmill.processes.signals import run_and_exit

MESHES: dict[str, dict[str, Any]] = {"shard": {"shard": 2}, "tensor": {"tensor": 2}, "replicate": {"replicate": 2}}
OPTIMIZERS = ("adamw", "muon")


def config_with(mesh: str, optimizer: str) -> RunConfig:
    """The config of a layout."""
    return config_of(MESHES[mesh], optimizer=optimizer)


def held_bytes(engine: Any) -> dict[str, int]:
    """The bytes of weights, gradients and optimizer state that an engine has in a step, summed over its tensors."""
    optimizer, seen = engine.optimizer, {}
    adamw = optimizer.optimizers["adamw"]
    update = adamw.step

    def counted(*arguments: Any) -> None:
        seen["gradients"] = sum(own.grad.nbytes for own in optimizer.local_parts.values())
        update(*arguments)

    adamw.step = counted
    stepped(engine, range(1), "gpt2")
    local = [engine.parallel.local(parameter) for parameter in engine.net.parameters()]
    seen["weights"] = sum(part.nbytes for part in local)
    seen["optimizer"] = sum(values.nbytes for state in adamw.state().values() for values in state.values())
    if "muon" in optimizer.optimizers:
        muon = optimizer.optimizers["muon"]
        if isinstance(muon, ShardedMuon):
            seen["optimizer"] += sum(change.nbytes for change in muon.changes.values())
            muon = muon.muon
        seen["optimizer"] += sum(stack.momenta.nbytes for stack in muon.stacks.values())
    seen["optimizer"] += sum(values.nbytes for values in engine.average.tensors)
    return seen


def main(folder: Path) -> int:
    """Train one step with every mesh and optimizer."""
    with closing(open_ranks(config_with("shard", "adamw").engine)) as ranks:
        found = {
            f"{mesh} {optimizer}": held_bytes(started(config_with(mesh, optimizer), ranks))
            for mesh in MESHES
            for optimizer in OPTIMIZERS
        }
        (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    run_and_exit(lambda: main(Path(sys.argv[1])))
