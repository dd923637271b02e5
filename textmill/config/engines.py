"""Sections of the engines: a class a kind, over what all of them are told."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from textmill.config.section import Section, changeable, path
from textmill.errors import TextmillError


class EngineSection(Section):
    """What every engine is told."""

    one_process: ClassVar[bool] = False
    """Whether one process has all devices of a machine; else each device has a process of its own."""
    refused: ClassVar[dict[str, str]] = {}
    """Optimizers that an engine does not have, and why."""
    kind: str
    """Which engine."""
    micro_batch: int | Literal["auto"] = changeable("auto")
    """Samples that go through the device at a time; auto: as many as a simple memory rule allows."""
    recompute: int = changeable(0, ge=0)
    """Make inner states again in backward instead of keeping them, so many blocks at a time; 0: keep all. Same numbers, less memory."""
    timeout: float = changeable(600.0, gt=0)
    """Several processes: seconds without a move of any of them after which the run ends and says which process the others wait for;
    before the first step 60 at least."""
    check_replicas_every: int = changeable(100, ge=1)
    """Several processes: steps between two looks at whether their copies of the weights are still the same."""

    @field_validator("micro_batch")
    @classmethod
    def _some(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"engine.micro_batch: found {value}; give 1 or more, or auto")
        return value


class MeshConfig(Section):
    """How the processes that a launcher started share the work."""

    replicate: int | None = changeable(None, ge=1)
    """Copies of the net, each on samples of its own; as many as there are processes for if not said."""
    shard: int = changeable(1, ge=1)
    """Processes that a copy's weights, gradients and moments are cut over, each on samples of its own (FSDP, ZeRO-3)."""
    keep_gathered: bool = changeable(False)
    """shard: keep a block's gathered weights from forward to backward: more memory, a third less traffic (ZeRO-2)."""
    tensor: int = changeable(1, ge=1)
    """Processes that share the heads, the MLPs and the vocabulary of each layer, on the same samples (Megatron)."""
    sequence_parallel: bool = changeable(True)
    """tensor: share the LayerNorms and the stream between layers by tokens too: less memory, the same traffic."""


class TorchEngine(EngineSection):
    """PyTorch on one device, or on many: one process each, started by torchrun or srun."""

    kind: Literal["torch"] = "torch"
    """torch: PyTorch."""
    device: str = changeable("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    """auto, cpu, cuda, cuda:1 or mps; auto takes a GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = changeable("auto")
    """Arithmetic of the matrix products; weights stay fp32. fp16 trains with a loss scale that finds its own height.
    fp8: bf16, with the products of MLPs and head in training rounded to fp8, on GPUs that have it (compute capability 8.9).
    auto: bf16 on a GPU that has it, fp16 on one of the V100's generation, else fp32."""
    compile: Literal["auto"] | bool = changeable("auto")
    """Compile the net with torch.compile: the first step takes longer, those after it about half of their time on a GPU.
    auto: on one GPU, for runs of more than a minute or so, unless every bit has to repeat."""
    mesh: MeshConfig = changeable(MeshConfig())
    """How many processes share the work."""
    deterministic: bool = changeable(False)
    """Bitwise the same numbers at every repeat on a GPU too, at some cost."""


class JaxMesh(Section):
    """How JAX devices share the work; the product of the axes is the number of devices."""

    replicate: int | None = changeable(None, ge=1)
    """Copies of the net, each on samples of its own; as many as the devices leave room for if not said."""
    shard: int = changeable(1, ge=1)
    """Devices, each on samples of its own, that hold weights and moments in parts and put a weight together to use it."""
    tensor: int = changeable(1, ge=1)
    """Devices that compute the same samples together, each with a part of the heads, the inner channels and the vocabulary."""


class JaxEngine(EngineSection):
    """JAX on one device or a mesh of them."""

    one_process: ClassVar[bool] = True
    kind: Literal["jax"] = "jax"
    """jax: JAX, on all its devices."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = changeable("auto")
    """auto, cpu, cuda or tpu; auto takes what JAX finds. A TPU was never tried."""
    precision: Literal["auto", "fp32", "bf16"] = changeable("auto")
    """Arithmetic of the matrix products; weights stay fp32. auto: bf16 on an accelerator, fp32 on a CPU."""
    mesh: JaxMesh = changeable(JaxMesh())
    """How the devices share the work."""
    deterministic: bool = changeable(False)
    """Bitwise the same numbers at every repeat on a GPU too, at some cost. It was never tried on one."""


class DeepSpeedEngine(EngineSection):
    """DeepSpeed: weights, gradients and moments shared out over the processes that deepspeed, torchrun or srun started."""

    refused: ClassVar[dict[str, str]] = {"muon": "muon wants whole matrices, which DeepSpeed cuts up"}
    kind: Literal["deepspeed"] = "deepspeed"
    """deepspeed: DeepSpeed's ZeRO over PyTorch."""
    device: str = changeable("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:1; auto takes a GPU where there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = changeable("auto")
    """Arithmetic of the net; masters stay fp32. fp16 has a loss scale that moves by itself. auto: bf16 on a GPU that has it, else fp32."""
    zero: Literal["auto", 0, 1, 2, 3] = changeable("auto")
    """What the processes share out: 0: nothing; 1: moments; 2: gradients too; 3: weights too. auto: as `engine.deepspeed_config` says, or 2."""
    offload_optimizer: Literal["cpu", "nvme"] | None = changeable(None)
    """Where masters and moments are kept instead of the device; nvme wants `engine.zero=3`."""
    offload_weights: Literal["cpu", "nvme"] | None = changeable(None)
    """Where weights wait until they are needed; wants `engine.zero=3`."""
    nvme_folder: str | None = path()
    """A folder on a fast disk, for what is offloaded to nvme."""
    deepspeed_config: str | None = path()
    """A DeepSpeed JSON file, taken as it is; what it says against our settings is refused by name."""
    deepspeed_overrides: dict[str, Any] = changeable({})
    """More of DeepSpeed's own settings, laid over all others."""

    @model_validator(mode="after")
    def _offloads(self) -> DeepSpeedEngine:
        places = [self.offload_optimizer, self.offload_weights]
        if self.offload_weights and self.zero in (0, 1, 2):
            raise TextmillError(
                f"engine.offload_weights: wants engine.zero=3, found {self.zero}; whole weights stay on the device"
            )
        if self.offload_optimizer and self.zero == 0:
            raise TextmillError("engine.offload_optimizer: wants engine.zero of 1 or more, found 0; set engine.zero=2")
        if self.offload_optimizer == "nvme" and self.zero in (1, 2):
            raise TextmillError(
                f"engine.offload_optimizer: nvme wants engine.zero=3, found {self.zero}; set it, or offload to cpu"
            )
        if "nvme" in places and self.nvme_folder is None and self.deepspeed_config is None:
            raise TextmillError(
                "engine.nvme_folder: not said; name a folder on a fast disk, since something is offloaded to nvme"
            )
        if self.precision == "fp16" and self.zero == 0:
            raise TextmillError(
                "engine.precision: fp16 wants engine.zero of 1 or more, found 0; set engine.zero=1 or engine.precision=bf16"
            )
        return self


EngineConfig = TorchEngine | JaxEngine | DeepSpeedEngine
