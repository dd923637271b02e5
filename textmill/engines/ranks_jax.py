"""JAX's devices and processes: one process per host, each with all devices of its host."""

from __future__ import annotations

import os

import jax

from textmill.engines.ranks_torch import open_ranks as open_torch_ranks
from textmill.engines.ranks_torch import read_launch
from textmill.errors import TextmillError
from textmill.processes.heartbeat import START_SECONDS
from textmill.processes.ranks import Ranks

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""JAX's platform names by value of `engine.device`."""


def open_ranks(device: str, timeout: float) -> Ranks:
    """The processes that torchrun, srun or mpirun started, or this single process.

    Their collectives on the host run over gloo, as in torch; JAX's coordinator uses the next port.
    """
    ranks = open_torch_ranks("cpu", timeout)
    launch = read_launch(os.environ)
    if launch is not None and launch.world > 1:
        host, _, port = launch.address.rpartition(":")
        _restrict_platform(device)
        jax.distributed.initialize(
            f"{host}:{int(port) + 1}",
            launch.world,
            launch.rank,
            initialization_timeout=int(max(timeout, START_SECONDS)),
        )
    return ranks


def open_devices(name: str) -> list[jax.Device]:
    """The devices of `engine.device`; auto uses JAX's default."""
    jax.config.update("jax_default_matmul_precision", "highest")
    _restrict_platform(name)
    try:
        devices: list[jax.Device] = jax.devices(None if name == "auto" else PLATFORMS[name])
    except RuntimeError:
        raise TextmillError(
            f"engine.device: '{name}' is not available; found {jax.devices()[0].platform}; set engine.device=auto"
        ) from None
    return devices


def _restrict_platform(name: str) -> None:
    """In a CPU run, stop JAX from reserving the memory of accelerators."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
