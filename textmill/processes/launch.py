"""The environment that torchrun, srun or mpirun set: which process this is, of how many."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from textmill.errors import TextmillError

FIRST_PORT = 20_000
PORTS = 20_000
"""The range of the rendezvous port under srun and mpirun, chosen by job, if MASTER_PORT is not set."""


@dataclass(frozen=True)
class Launch:
    """A process's rank among the processes that were started together."""

    rank: int
    world: int
    local: int
    """Its rank on its own machine, and the number of its GPU."""
    address: str
    """host:port of the rendezvous, on rank 0."""


def read_launch(environment: Mapping[str, str]) -> Launch | None:
    """Rank and world size from the variables of torchrun, mpirun or srun; None for a process without a launcher."""
    try:
        launch = _parse_launch(environment)
    except ValueError as error:
        raise TextmillError(
            f"the launcher's environment: {error}; start the processes with torchrun, srun or mpirun"
        ) from None
    if launch is not None and not 0 <= launch.rank < launch.world:
        raise TextmillError(
            f"the launcher's environment: rank {launch.rank} of {launch.world} processes; "
            "start them with torchrun, srun or mpirun"
        )
    return launch


def _parse_launch(environment: Mapping[str, str]) -> Launch | None:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        address = f"{environment.get('MASTER_ADDR', 'localhost')}:{environment.get('MASTER_PORT', 29500)}"
        return Launch(
            int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", 0)), address
        )
    if "OMPI_COMM_WORLD_SIZE" in environment:  # before SLURM: there, mpirun starts one task per machine
        return _parse_open_mpi(environment)
    if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        host = environment.get("MASTER_ADDR") or first_host(environment.get("SLURM_STEP_NODELIST", "localhost"))
        port = environment.get("MASTER_PORT") or FIRST_PORT + int(environment.get("SLURM_JOB_ID", 0)) % PORTS
        rank = int(environment["SLURM_PROCID"])
        world = int(environment["SLURM_STEP_NUM_TASKS"])
        return Launch(rank, world, int(environment.get("SLURM_LOCALID", 0)), f"{host}:{port}")
    return None


def _parse_open_mpi(environment: Mapping[str, str]) -> Launch:
    """Open MPI does not tell where rank 0 is, so several machines need MASTER_ADDR."""
    rank = int(environment["OMPI_COMM_WORLD_RANK"])
    world = int(environment["OMPI_COMM_WORLD_SIZE"])
    host = environment.get("MASTER_ADDR")
    if host is None and int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", world)) < world:
        raise TextmillError(
            "the launcher's environment: mpirun started processes on several machines, and no MASTER_ADDR; "
            "name the machine of rank 0: mpirun -x MASTER_ADDR=HOST ..."
        )
    job = zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode())
    port = environment.get("MASTER_PORT") or FIRST_PORT + job % PORTS
    return Launch(rank, world, int(environment.get("OMPI_COMM_WORLD_LOCAL_RANK", 0)), f"{host or 'localhost'}:{port}")


def first_host(nodes: str) -> str:
    """The first name in a SLURM node list: gpu[03-07,9],cpu1 -> gpu03."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\])?", nodes)
    return (match[1] + (match[2] or "")) if match else nodes
