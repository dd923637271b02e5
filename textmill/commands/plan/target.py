"""The machine that a plan is for: this one, or one that the user describes."""

from __future__ import annotations

from dataclasses import dataclass

from textmill.config import JaxEngine, RunConfig, TorchEngine
from textmill.devices import GPU_GB, PEAK_FLOPS, memory_of, name_of, open_device, peak_flops_of, torch_dtype
from textmill.engines.memory.estimate import DTYPES, Device
from textmill.errors import TextmillError

USABLE = 0.95
"""The fraction of a device's memory that tensors can use; the rest is for the driver and for fragmentation."""
OLD_GPUS = ("V100", "T4")
"""GPUs without bf16, where `engine.precision: auto` is fp16."""


@dataclass(frozen=True)
class Target:
    """Devices of one kind."""

    name: str
    devices: int
    device: Device
    peak: float | None
    """Peak operations per second of one device; None: not known."""
    here: bool
    """Whether it is this machine's device, so that steps can be timed."""

    @property
    def usable(self) -> int:
        """Bytes of one device that tensors can use."""
        return int(USABLE * self.device.memory)


def target_of(config: RunConfig) -> Target:
    """The devices of `plan`, else this machine's device."""
    plan = config.plan
    devices = config.plan.devices or _mesh_size(config)
    peak = plan.tflops * 1e12 if plan.tflops else None
    if plan.gpu or plan.memory_gb:
        name = _known_gpu(plan.gpu) if plan.gpu else "GPU"
        memory = int((plan.memory_gb or GPU_GB.get(name, 0)) * 2**30)
        precision = "fp16" if name in OLD_GPUS else "bf16"
        return Target(name, devices, Device(True, memory, precision), peak or PEAK_FLOPS.get(name), here=False)
    device = open_device(config.engine.device)
    precision = next(name for name, dtype in DTYPES.items() if dtype == torch_dtype("auto", device))
    found = Device(device.type == "cuda", memory_of(device), precision)
    return Target(name_of(device), devices, found, peak or peak_flops_of(device), here=devices == 1)


def _mesh_size(config: RunConfig) -> int:
    if not isinstance(config.engine, TorchEngine | JaxEngine):
        return 1
    mesh = config.engine.mesh
    return (mesh.replicate or 1) * mesh.shard * mesh.tensor


def _known_gpu(name: str) -> str:
    found = [known for known in PEAK_FLOPS if known.lower().replace(" ", "") == name.lower().replace(" ", "")]
    if not found:
        raise TextmillError(
            f"plan.gpu: '{name}' is not known; give one of {', '.join(PEAK_FLOPS)}, or plan.memory_gb and plan.tflops"
        )
    return found[0]
