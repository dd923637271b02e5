"""JAX's devices, and the processes that share them: one process a host, each with all devices of its own."""

from __future__ import annotations

import os

import jax

from textmill.engines.ranks_torch import launch_of
from textmill.engines.ranks_torch import open_ranks as open_torch_ranks
from textmill.errors import TextmillError
from textmill.processes.heartbeat import START_SECONDS
from textmill.processes.ranks import Ranks

PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""The words of `engine.device` in JAX's."""


def open_ranks(device: str, timeout: float) -> Ranks:
    """The processes that torchrun or srun started, or this one alone.

    They agree over gloo, as torch's do; JAX has a meeting place of its own, one port further.
    """
    ranks, launch = open_torch_ranks("cpu", timeout), launch_of(os.environ)
    if launch is not None and launch.world > 1:
        host, _, port = launch.meet.rpartition(":")
        _choose(device)
        jax.distributed.initialize(
            f"{host}:{int(port) + 1}",
            launch.world,
            launch.rank,
            initialization_timeout=int(max(timeout, START_SECONDS)),
        )
    return ranks


def open_devices(name: str) -> list[jax.Device]:
    """The devices of `engine.device`; auto takes what JAX takes."""
    jax.config.update("jax_default_matmul_precision", "highest")
    _choose(name)
    try:
        devices: list[jax.Device] = jax.devices(None if name == "auto" else PLATFORMS[name])
    except RuntimeError:
        raise TextmillError(
            f"engine.device: '{name}' is not available; found {jax.devices()[0].platform}; set engine.device=auto"
        ) from None
    return devices


def _choose(name: str) -> None:
    """Keep a CPU's run away from accelerators, whose memory JAX would take."""
    if name == "cpu":
        jax.config.update("jax_platforms", "cpu")
