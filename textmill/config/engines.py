"""Sections with kinds: an engine and a runner of data work have one class per kind, with what kinds share in a base."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import field_validator, model_validator

from textmill.config.section import Section, changeable, path
from textmill.errors import TextmillError


class EngineSection(Section):
    """Settings that every engine has."""

    one_process: ClassVar[bool] = False
    """True if one process uses all devices of a machine; otherwise each device has its own process."""
    refused: ClassVar[dict[str, str]] = {}
    """Settings that the engine does not support, such as train.ema_window or train.optimizer=muon, and why."""
    kind: str
    """Which engine."""
    micro_batch: int | Literal["auto"] = changeable("auto")
    """Samples per device in one forward and backward pass; the rest of the batch is gradient accumulation.
    auto: as many as the memory estimate of `textmill plan` allows."""
    activation_checkpointing: int = changeable(0, ge=0)
    """Activation checkpointing: recompute activations in the backward pass, this many blocks at a time; 0: keep all.
    Same results, less memory."""
    timeout: float = changeable(600.0, gt=0)
    """Several processes: seconds without progress of any of them after which the run ends with the name of the process
    that the others wait for (a deadlock); at least 60 before the first step."""

    @field_validator("micro_batch")
    @classmethod
    def _check_micro_batch(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"engine.micro_batch: found {value}; give 1 or more, or auto")
        return value


class JaxMesh(Section):
    """How devices share the work; the product of the sizes is their number."""

    replicate: int | None = changeable(None, ge=1)
    """Data parallel: replicas of the model, each with different samples; default: as many as the devices allow."""
    shard: int = changeable(1, ge=1)
    """FSDP (ZeRO-3): devices that shard a replica's weights, gradients and optimizer state, each with different
    samples."""
    tensor: int = changeable(1, ge=1)
    """Tensor parallel: devices that share the heads, the MLPs and the vocabulary of each layer, on the same samples
    (Megatron)."""


class MeshConfig(JaxMesh):
    """How the processes that a launcher started, one for each device, share the work."""

    keep_gathered: bool = changeable(False)
    """FSDP: keep a block's gathered weights from forward to backward: more memory, a third less communication
    (ZeRO-2)."""
    sequence_parallel: bool = changeable(True)
    """Tensor parallel: also split LayerNorms and the residual stream by tokens: less memory, the same communication."""
    pipeline: int = changeable(1, ge=1)
    """Pipeline parallel: stages that have consecutive blocks of the net and pass micro-batches on, at
    least as many as there are stages."""
    schedule: Literal["1f1b", "gpipe", "interleaved"] = changeable("1f1b")
    """Pipeline parallel: the order of passes. 1f1b: alternately forward and backward; gpipe: all forward passes first,
    which keeps more activations; interleaved: 1f1b with two groups of blocks on each stage, which waits less and sends
    more."""


class TorchEngine(EngineSection):
    """PyTorch on one device, or on many with one process each, started by torchrun or srun."""

    kind: Literal["torch"] = "torch"
    """torch: PyTorch."""
    device: str = changeable("auto", pattern=r"^(auto|cpu|cuda(:\d+)?|mps)$")
    """auto, cpu, cuda, cuda:1 or mps; auto: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = changeable("auto")
    """Precision of the matmuls; weights stay fp32. fp16: with dynamic loss scaling. fp8: bf16, with the training
    matmuls of MLPs and head in fp8, on GPUs that support it (compute capability 8.9). auto: bf16 on a GPU that supports
    it, fp16 on one of the V100's generation, else fp32."""
    compile: Literal["auto"] | bool = changeable("auto")
    """Compile the net with torch.compile: the first step takes longer, later steps about half the time on a GPU.
    auto: on GPUs without tensor parallelism, for runs of more than about a minute and a half (2.5 minutes with fewer
    than 8 cores), unless `engine.deterministic` is set. true is refused with tensor parallelism on a GPU."""
    mesh: MeshConfig = changeable(MeshConfig())
    """How many processes share the work."""
    sync_every: int | None = changeable(None, ge=1)
    """Local SGD (DiLoCo), for slow networks: replicas train alone and synchronise their weights every so many steps;
    default: gradients are summed in each step. The numbers are then not those of one process."""
    outer_learning_rate: float = changeable(1.0, gt=0)
    """Local SGD: the learning rate of the step that a synchronisation takes."""
    outer_momentum: float = changeable(0.5, ge=0, lt=1)
    """Local SGD: the Nesterov momentum of these steps; DiLoCo's, for long runs, is 0.9 with a learning rate of 0.7."""
    deterministic: bool = changeable(False)
    """Use deterministic algorithms: bitwise the same results in every run on a GPU too, but slower."""


class JaxEngine(EngineSection):
    """JAX on one device or a mesh of them."""

    one_process: ClassVar[bool] = True
    refused: ClassVar[dict[str, str]] = {
        "train.ema_window": "the JAX engine does not average weights",
        "train.layout=labelled": "the JAX engine has no heads for labels",
        "train.distil.teachers": "the JAX engine has no distillation",
    }
    kind: Literal["jax"] = "jax"
    """jax: JAX, on all its devices."""
    device: Literal["auto", "cpu", "cuda", "tpu"] = changeable("auto")
    """auto, cpu, cuda or tpu; auto: what JAX finds. Not tested on a TPU."""
    precision: Literal["auto", "fp32", "bf16"] = changeable("auto")
    """Precision of the matmuls; weights stay fp32. auto: bf16 on an accelerator, fp32 on a CPU."""
    mesh: JaxMesh = changeable(JaxMesh())
    """How the devices share the work."""
    deterministic: bool = changeable(False)
    """Use deterministic algorithms: bitwise the same results in every run on a GPU too, but slower. Not tested on a
    GPU."""


class DeepSpeedEngine(EngineSection):
    """DeepSpeed ZeRO: weights, gradients and optimizer state sharded over processes started by deepspeed, torchrun or
    srun."""

    refused: ClassVar[dict[str, str]] = {
        "train.optimizer=muon": "muon needs full matrices, which DeepSpeed shards; adamw needs a lower "
        "train.learning_rate, such as 6e-4",
        "train.ema_window": "the DeepSpeed engine does not average weights",
    }
    kind: Literal["deepspeed"] = "deepspeed"
    """deepspeed: DeepSpeed's ZeRO over PyTorch."""
    device: str = changeable("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu, cuda or cuda:1; auto: a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = changeable("auto")
    """Precision of the net; master weights stay fp32. fp16: with dynamic loss scaling. auto: bf16 on a GPU that
    supports it, else fp32."""
    zero: Literal["auto", 0, 1, 2, 3] = changeable("auto")
    """ZeRO stage, what the processes shard: 0: nothing; 1: optimizer state; 2: gradients too; 3: weights too.
    auto: the stage in `engine.deepspeed_config`, or 2."""
    offload_optimizer: Literal["cpu", "nvme"] | None = changeable(None)
    """Keep master weights and optimizer state in CPU memory or on NVMe instead of on the device; nvme needs
    `engine.zero=3`."""
    offload_weights: Literal["cpu", "nvme"] | None = changeable(None)
    """Keep weights in CPU memory or on NVMe until they are needed; needs `engine.zero=3`."""
    nvme_folder: str | None = path()
    """A folder on a fast disk for what is offloaded to nvme."""
    deepspeed_config: str | None = path()
    """A DeepSpeed JSON config: settings that are not given are taken from it, and one that differs is an error."""
    deepspeed_overrides: dict[str, Any] = changeable({})
    """More of DeepSpeed's own settings; they override all others."""

    @model_validator(mode="after")
    def _check_offloading(self) -> DeepSpeedEngine:
        places = [self.offload_optimizer, self.offload_weights]
        if self.offload_weights and self.zero in (0, 1, 2):
            raise TextmillError(
                f"engine.offload_weights: needs engine.zero=3, found {self.zero}; full weights stay on the device"
            )
        if self.offload_optimizer and self.zero == 0:
            raise TextmillError("engine.offload_optimizer: needs engine.zero of 1 or more, found 0; set engine.zero=2")
        if self.offload_optimizer == "nvme" and self.zero in (1, 2):
            raise TextmillError(
                f"engine.offload_optimizer: nvme needs engine.zero=3, found {self.zero}; set it, or offload to cpu"
            )
        if "nvme" in places and self.nvme_folder is None and self.deepspeed_config is None:
            raise TextmillError(
                "engine.nvme_folder: not set, and something is offloaded to nvme; name a folder on a fast disk"
            )
        if self.precision == "fp16" and self.zero == 0:
            raise TextmillError(
                "engine.precision: fp16 needs engine.zero of 1 or more, found 0; set engine.zero=1 or "
                "engine.precision=bf16"
            )
        return self


EngineConfig = TorchEngine | JaxEngine | DeepSpeedEngine


class LocalRunner(Section):
    """Run data work in processes of this machine."""

    kind: Literal["local"] = changeable("local")
    """local: a pool of processes on this machine."""
    workers: int | Literal["auto"] = changeable("auto")
    """Processes at a time; auto: one per core."""

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"runner.workers: found {value}; give 1 or more, or auto")
        return value


class BeamRunner(Section):
    """Run data work with Apache Beam, on this machine or on any engine that Beam supports."""

    kind: Literal["beam"] = changeable("beam")
    """beam: an Apache Beam pipeline (extra: textmill[beam])."""
    options: list[str] = changeable([])
    """Beam's own options, such as `--runner=FlinkRunner`; default: its direct runner, on this machine."""
    shared_folder: str | None = path()
    """A folder that every worker can reach, for their results; default: a temporary folder of this machine."""


RunnerConfig = LocalRunner | BeamRunner
