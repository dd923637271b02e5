"""The nearest settings with which a run fits, if it does not fit as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from textmill.commands.plan.target import Target
from textmill.config import JaxEngine, RunConfig, TorchEngine
from textmill.config.engines import DeepSpeedEngine, MeshConfig
from textmill.engines.memory.estimate import Device, Estimate, Estimator
from textmill.errors import TextmillError

WANTED = 3
"""How many settings are offered."""
MORE_DEVICES = (1, 2, 4, 8, 16)
"""Times the devices."""


@dataclass(frozen=True)
class Option:
    """Changed settings, and how far they are from the user's own."""

    settings: dict[str, Any]
    devices: int
    distance: float
    config: RunConfig


@dataclass(frozen=True)
class Fitting:
    """Changed settings with which the run fits."""

    settings: dict[str, Any]
    estimate: Estimate


def nearest_fitting(config: RunConfig, estimator: Estimator, target: Target, estimate: Estimate) -> list[Fitting]:
    """Up to three settings that fit, the nearest first; none is another one with further changes."""
    found: list[Fitting] = []
    for option in sorted(_options(config, target, estimate), key=lambda option: option.distance):
        if any(one.settings.items() <= option.settings.items() or _only_more(one, option) for one in found):
            continue
        fitting = _estimate(option, estimator, target.device, exact=False)
        if fitting is None or fitting.memory.total > target.usable:
            continue
        exact = _estimate(option, estimator, target.device, exact=True)
        if exact is not None and exact.memory.total <= target.usable:
            found.append(Fitting(option.settings, exact))
        if len(found) == WANTED:
            break
    return found


def _only_more(one: Fitting, option: Option) -> bool:
    """Whether an option differs from one that fits only in a smaller micro-batch or in more devices."""
    loose = ("engine.micro_batch", "plan.devices")
    return {key: value for key, value in one.settings.items() if key not in loose}.items() == {
        key: value for key, value in option.settings.items() if key not in loose
    }.items()


def _estimate(option: Option, estimator: Estimator, device: Device, *, exact: bool) -> Estimate | None:
    try:
        return estimator.estimate(option.config, option.devices, device, exact=exact)
    except TextmillError:
        return None  # this batch, net or mesh cannot be divided so


def _options(config: RunConfig, target: Target, estimate: Estimate) -> Iterator[Option]:
    for times in MORE_DEVICES:
        devices = target.devices * times
        more = {"plan.devices": devices} if times > 1 else {}
        for recompute in dict.fromkeys((config.engine.recompute, 1)):
            checkpointing = {"engine.recompute": 1} if recompute != config.engine.recompute else {}
            for micro in _halvings(estimate.micro_batch):
                # Named even if it stays: `auto` might choose another one with the other settings.
                smaller = {"engine.micro_batch": micro} if micro != config.engine.micro_batch else {}
                base = {**more, **checkpointing, **smaller}
                far = 2.0 * math.log2(times) + len(checkpointing) + 0.4 * math.log2(estimate.micro_batch / micro)
                engine = {"recompute": recompute, "micro_batch": micro}
                yield from _meshes(config, base, engine, devices, far)


def _meshes(
    config: RunConfig, base: dict[str, Any], engine: dict[str, Any], devices: int, far: float
) -> Iterator[Option]:
    """The user's own mesh, other meshes of the torch engine, and DeepSpeed with offload."""

    def option(settings: dict[str, Any], distance: float, section: Any) -> Option:
        return Option({**base, **settings}, devices, far + distance, config.model_copy(update={"engine": section}))

    if not isinstance(config.engine, TorchEngine):
        yield option({}, 0.0, config.engine.model_copy(update=engine))
    else:
        own = config.engine.mesh
        for shard, tensor in _axes(devices):
            changed = {
                f"engine.mesh.{name}": value
                for name, value in (("shard", shard), ("tensor", tensor))
                if value != getattr(own, name)
            }
            mesh = MeshConfig(**{**own.model_dump(), "replicate": None, "shard": shard, "tensor": tensor})
            distance = sum(
                1.0 + 0.2 * abs(math.log2(value / getattr(own, key.rpartition(".")[2])))
                for key, value in changed.items()
            )
            distance += 0.5 * ("engine.mesh.tensor" in changed)
            yield option(changed, distance, config.engine.model_copy(update={**engine, "mesh": mesh}))
    if (
        config.train.optimizer == "adamw"
        and config.train.average.memory is None
        and not isinstance(config.engine, JaxEngine)
    ):
        section = DeepSpeedEngine(zero=3, offload_optimizer="cpu", **engine)
        settings = {"engine.kind": "deepspeed", "engine.zero": 3, "engine.offload_optimizer": "cpu"}
        already = isinstance(config.engine, DeepSpeedEngine) and config.engine.zero == 3
        yield option(settings, 2.0 if already else 4.0, section)


def _axes(devices: int) -> Iterator[tuple[int, int]]:
    """Shards and tensor-parallel ranks: powers of two, and the number of devices itself."""
    sizes = sorted({devices, *(1 << power for power in range(devices.bit_length()))})
    for tensor in (1, 2, 4, 8):
        for shard in sizes:
            if devices % (shard * tensor) == 0:
                yield shard, tensor


def _halvings(micro: int) -> Iterator[int]:
    while True:
        yield micro
        if micro % 2:
            break
        micro //= 2
    if micro > 1:
        yield 1
