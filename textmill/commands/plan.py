"""The command plan: memory by part, time, disk and cost of a run before it starts, on this machine or another.

`textmill.planning` chooses settings for `new` and `tune`; this command estimates what given settings take.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np

from textmill.checkpoints.folders import open_model
from textmill.config import (
    EngineConfig,
    JaxEngine,
    LoraConfig,
    ModelConfig,
    PlanConfig,
    RunConfig,
    TorchEngine,
    TrainConfig,
)
from textmill.config.engines import DeepSpeedEngine, MeshConfig
from textmill.devices import GPUS, memory_of, name_of, open_device, peak_flops_of, torch_dtype
from textmill.engines import Engine, open_engine
from textmill.engines.distillation import teacher_flops
from textmill.engines.memory import DTYPES, Device, Estimate, Estimator, is_compiled
from textmill.engines.meshes import Mesh, stage_blocks, stages_of
from textmill.engines.optimizers import state_sizes
from textmill.engines.speed import Cluster, Layout, StepTime, cluster_of, step_time
from textmill.errors import TextmillError
from textmill.models import Shape, Weight, initial_weights, label_head_of, open_family
from textmill.models.family_files import find_family_file
from textmill.models.lora import initial_adapters, saved_weights, weights_with_adapters
from textmill.storage.stages import MANIFEST
from textmill.tokens.batches.batch import IGNORED, Batch
from textmill.tokens.batches.blend import BatchSizes
from textmill.tokens.batches.loader import open_batches
from textmill.tokens.splits import Splits, open_splits
from textmill.tokens.store import dtype_for
from textmill.tokens.vocabulary.tokenizer import open_tokenizer, open_used
from textmill.training.auto_preset import fill_auto_preset
from textmill.training.run_length import RunLength, plan_run_length
from textmill.training.start import choose_shape, shape_of_checkpoint


def plan(config: RunConfig, best: bool = False, as_json: bool = False) -> dict[str, Any]:
    """Print and return what the run takes; writes nothing. `best`: also the fastest settings that fit."""
    data = open_data(config)
    if config.train.preset == "auto" and config.train.open_settings and data.splits is None:
        raise TextmillError(
            f"train.preset: auto computes {', '.join(config.train.open_settings)} from the tokens, and there are none "
            "yet; run textmill tokenize first, or set these keys"
        )
    config = fill_auto_preset(config)
    shape = open_shape(config.model, config.train.length, data)
    target = target_of(config.plan, config.engine)
    estimator = Estimator(shape, config.train, config.model.lora)
    estimate = estimator.estimate(config.engine, target.devices, target.device)
    fits = estimate.memory.total <= target.usable
    near = [] if fits else nearest_fitting(config.engine, estimator, target)
    figures: dict[str, Any] = {
        "machine": _describe_target(target),
        "generations": config.train.generations,
        "parameters": parameters_by_part(shape, config.model.lora),
        "trained": _count(estimator.trained),
        "memory": _describe_memory(config.engine.activation_checkpointing, estimate),
        "fits": fits,
        "settings_that_fit": near,
        **_describe_work(config, estimator, data, target, estimate),
    }
    if best:
        figures["fastest"] = fastest_fitting(config.engine, estimator, target)
    figures["disk"] = disk_of(estimator, data, figures["steps"], estimate.mesh)
    print(json.dumps(figures, indent=2, ensure_ascii=False) if as_json else format_plan(figures))
    return figures


def _describe_target(target: Target) -> dict[str, Any]:
    return {
        "device": target.name,
        "devices": target.devices,
        "memory": target.device.memory,
        "usable": target.usable,
        "peak_flops": target.peak,
    }


def _describe_memory(activation_checkpointing: int, estimate: Estimate) -> dict[str, Any]:
    mesh = {key: value for key, value in asdict(estimate.mesh).items() if key in ("replicate", "shard", "tensor")}
    mesh |= {"pipeline": estimate.mesh.pipeline} if estimate.mesh.pipeline > 1 else {}
    return {
        **asdict(estimate.memory),
        "total": estimate.memory.total,
        "host": estimate.host,
        "engine": estimate.engine,
        "precision": estimate.precision,
        "micro_batch": estimate.micro_batch,
        "passes": estimate.passes,
        "activation_checkpointing": activation_checkpointing,
        "mesh": mesh,
    }


def _describe_work(
    config: RunConfig, estimator: Estimator, data: Data, target: Target, estimate: Estimate
) -> dict[str, Any]:
    """Steps, tokens, operations, time and cost; with `train.minutes` the steps follow from the time."""
    length = run_length_of(config.train, config.plan.tokens, estimator.length, data)
    flops_per_token = estimator.shape.flops_per_token(estimator.length, estimator.trained)
    flops_per_token += teacher_flops(config.train.distil, estimator.length)
    step_tokens = config.train.batch * estimator.length
    speed: Speed | None
    if target.here and estimate.memory.total <= target.usable and config.plan.probe_steps:
        speed = probe_speed(config.engine, estimator, estimate, config.plan.probe_steps)
    else:
        speed = forecast_speed(config.engine, estimator, target, estimate)
        speed = speed or stated_speed(config.engine.activation_checkpointing, target, flops_per_token * step_tokens)
    rate = step_tokens / speed.step_seconds if speed else None
    steps, seconds = _steps_and_seconds(config.train.minutes, length, speed, step_tokens)
    run_tokens = length.tokens_after(steps) if length is not None and steps is not None else None
    hours = None if seconds is None else seconds / 3600
    price = config.plan.price
    return {
        "steps": steps,
        "tokens": run_tokens,
        "train_tokens": data.tokens,
        "epochs": run_tokens / data.tokens if run_tokens is not None and data.tokens else None,
        "flops_per_token": flops_per_token,
        "flops": None if run_tokens is None else flops_per_token * run_tokens,
        "communication": communication_of(config.engine, estimator, estimate),
        "step_seconds": speed.step_seconds if speed else None,
        "speed": speed.source if speed else None,
        "step_parts": asdict(speed.parts) if speed and speed.parts else None,
        "tokens_per_second": rate,
        "mfu": rate * flops_per_token / (target.devices * target.peak) if rate and target.peak else None,
        "hours": hours,
        "cost": None if hours is None or price is None else hours * target.devices * price,
    }


def _steps_and_seconds(
    minutes: float | None, length: RunLength | None, speed: Speed | None, step_tokens: int
) -> tuple[int | None, float | None]:
    """How many steps the run has and how long they take, as far as known; `minutes` is `train.minutes`."""
    if minutes is not None:
        if speed is None:
            return None, 60.0 * minutes
        steps = max(1, int(60.0 * minutes / speed.step_seconds))
        if length is not None and length.max_steps < steps:
            return length.max_steps, length.max_steps * speed.step_seconds
        return steps, 60.0 * minutes
    if length is None or not length.known:
        return None, None
    seconds = None if speed is None else length.tokens_after(length.steps) / step_tokens * speed.step_seconds
    return length.steps, seconds


USABLE = 0.95
"""The fraction of a device's memory that tensors can use; the rest is for the driver and for fragmentation."""
OLD_GPUS = {"V100": "fp16", "T4": "fp16", "P100": "fp32", "P40": "fp32"}
"""GPUs without bf16, and what `engine.precision: auto` is there."""


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
    cluster: Cluster | None = None
    """Rates of the devices and what connects them; None: not known."""

    @property
    def usable(self) -> int:
        """Bytes of one device that tensors can use."""
        return int(USABLE * self.device.memory)


def target_of(plan: PlanConfig, engine: EngineConfig) -> Target:
    """The devices of `plan`, else this machine's device."""
    mesh = engine.mesh if isinstance(engine, TorchEngine | JaxEngine) else None
    stages = mesh.pipeline if isinstance(mesh, MeshConfig) else 1
    devices = plan.devices or ((mesh.replicate or 1) * mesh.shard * mesh.tensor * stages if mesh else 1)
    peak = plan.tflops * 1e12 if plan.tflops else None
    if plan.gpu or plan.memory_gb:
        name = _known_gpu(plan.gpu) if plan.gpu else "GPU"
        known = GPUS.get(name)
        memory = int((plan.memory_gb or (known.memory_gb if known else 0)) * 2**30)
        precision = OLD_GPUS.get(name, "bf16")
        peak = peak or (1e12 * known.tflops if known else None)
        return Target(name, devices, Device(True, memory, precision), peak, False, _cluster(name, peak, plan))
    device = open_device(engine.device)
    precision = next(name for name, dtype in DTYPES.items() if dtype == torch_dtype("auto", device))
    found = Device(device.type == "cuda", memory_of(device), precision)
    name, peak = name_of(device), peak or peak_flops_of(device)
    return Target(name, devices, found, peak, devices == 1, _cluster(name, peak, plan))


def _cluster(name: str, peak: float | None, plan: PlanConfig) -> Cluster | None:
    """The cluster of `plan`, of a GPU whose product name has that of a known one."""
    known = next((gpu for gpu in GPUS if gpu in name), None)
    if known is None or peak is None:
        return None
    network = plan.network_gbit_s * 1e9 / 8 / plan.per_node if plan.network_gbit_s else None
    return cluster_of(known, peak, plan.per_node, network)


def _known_gpu(name: str) -> str:
    found = [known for known in GPUS if known.lower().replace(" ", "") == name.lower().replace(" ", "")]
    if not found:
        raise TextmillError(
            f"plan.gpu: '{name}' is not known; give one of {', '.join(GPUS)}, or plan.memory_gb and plan.tflops"
        )
    return found[0]


@dataclass(frozen=True)
class Data:
    """What is known of the tokens: all of it once they are written, else only the size of the vocabulary."""

    vocab: int
    end: int
    splits: Splits | None
    tokens: int | None
    """Tokens of the train split."""


def open_data(config: RunConfig) -> Data:
    """The token store if there is one, else the tokenizer, else the vocabulary size of the config."""
    if config.tokens.use or (config.folder_of("tokens") / MANIFEST).is_file():
        splits = open_splits(config)
        tokens = config.plan.tokens or sum(store.tokens for store in splits.stores("train"))
        return Data(splits.tokenizer.vocab, splits.tokenizer.eos_id, splits, tokens)
    folder = config.folder_of("tokenizer")
    if (folder / MANIFEST).is_file():
        tokenizer = open_tokenizer(folder)
    elif config.tokenizer.use:
        tokenizer = open_used(config.tokenizer, config.train.layout)
    else:
        return Data(config.tokenizer.vocab, 0, None, config.plan.tokens)
    return Data(tokenizer.vocab, tokenizer.eos_id, None, config.plan.tokens)


def open_shape(model: ModelConfig, length: int | None, data: Data) -> Shape:
    """The shape that the run will have."""
    init_model = open_model(model.init_from) if model.init_from else None
    if data.splits is not None:
        return choose_shape(model, length, data.splits, init_model)
    if init_model is not None:
        return shape_of_checkpoint(init_model, model.shape)
    return open_family(model.family).shape_of(model, vocab=data.vocab, eos_id=data.end, length=length)


def run_length_of(train: TrainConfig, plan_tokens: int | None, length: int, data: Data) -> RunLength | None:
    """The length of a run with samples of this length; None if it is in epochs of tokens that are not known."""
    if data.splits is not None and plan_tokens is None:
        batches = open_batches(train, data.splits, length=length, folder=None)
        return plan_run_length(train, batches.sizes, batches.samples_per_epoch, length)
    if data.tokens is None and train.unit == "epochs":
        return None
    if not data.tokens:  # nobody knows how many steps an epoch has
        train = train.model_copy(update={"max_epochs": None})
    samples = max(1, (data.tokens or 1) // length)
    sizes = BatchSizes(train.batch, train.batch_rampup)
    return plan_run_length(train, sizes, samples, length)


def parameters_by_part(shape: Shape, lora: LoraConfig | None) -> dict[str, int]:
    """Parameters of each part of the net, without padding."""
    known = {weight.name for weight in shape.weights()}

    def part_of(weight: Weight) -> str:
        if weight.name not in known:
            return "LoRA adapters"
        if weight.by_token:
            return "token embedding and head"
        if weight.by_position:
            return "position embedding"
        if not 1 <= weight.depth <= shape.layers:
            return "outside the blocks"
        return "matrices of the blocks" if len(weight.shape) > 1 else "biases and norms of the blocks"

    parts: dict[str, int] = {}
    for weight in weights_with_adapters(shape, lora):
        parts[part_of(weight)] = parts.get(part_of(weight), 0) + weight.size
    return parts


def disk_of(estimator: Estimator, data: Data, steps: int | None, mesh: Mesh) -> dict[str, int]:
    """Bytes of a checkpoint, of all checkpoints that are kept, and of the token store."""
    train = estimator.train
    trained = _count(estimator.trained)
    state = sum(size for weight in estimator.trained for size in state_sizes(weight, train))
    state += trained if train.ema_window else 0
    if mesh.local:  # each worker's state and the outer momentum; between synchronisations also all weights
        state = mesh.replicate * state + trained
    checkpoint = 4 * (_count(saved_weights(estimator.shape, estimator.lora)) + state)
    keep = train.checkpoints.keep + 1  # the best one may be older
    if steps and train.checkpoints.keep_every:
        keep += steps // train.checkpoints.keep_every
    saves = steps // train.save_every + 1 if steps and isinstance(train.save_every, int) else keep
    kept = max(1, min(keep, saves))
    store = (data.tokens or 0) * dtype_for(data.vocab).itemsize
    return {"checkpoint": checkpoint, "checkpoints_kept": kept, "checkpoints": kept * checkpoint, "tokens": store}


def _count(weights: Iterable[Weight]) -> int:
    return sum(weight.size for weight in weights)


def communication_of(engine: EngineConfig, estimator: Estimator, estimate: Estimate) -> dict[str, int]:
    """Bytes that each device sends in a step, by kind of parallelism; of a pipeline, one of the first stage.

    A ring all-gather or reduce-scatter of B bytes on n devices sends (n - 1) / n x B, an all-reduce twice as much.
    """
    shape = estimator.shape
    trained = estimator.trained
    mesh = estimate.mesh
    state = estimate.state
    passes = estimate.passes
    sent: dict[str, int] = {}
    zero = getattr(engine, "zero", None)
    if mesh.pipeline > 1:
        trained = [weight for weight in trained if 0 in stages_of(mesh, shape.layers, weight)]
    all_gradients = state.gradients * (mesh.shard if mesh.shard > 1 else 1)
    if zero is not None:
        all_gradients = 4 * _count(trained)
    if mesh.replicate > 1:
        gathers = 2 if zero == 3 else 0  # ZeRO-3 gathers weights for forward and for backward
        ring = (mesh.replicate - 1) / mesh.replicate
        if mesh.local:
            sent[f"local SGD: weights, every {mesh.local.every} steps"] = round(
                2 * ring * all_gradients / mesh.local.every
            )
        else:
            sums = passes if mesh.pipeline > 1 and mesh.shard > 1 else 1
            sent["data parallel: gradients"] = round(2 * ring * sums * all_gradients / mesh.shard)
        if gathers:
            sent["ZeRO-3: weights"] = round(gathers * passes * ring * estimate.itemsize * shape.parameters)
    if mesh.shard > 1:
        ring = (mesh.shard - 1) / mesh.shard
        gathers = 1 if mesh.keep_gathered else 2
        blocks = state.weights - state.outside_blocks
        sent["FSDP: weights"] = round(passes * ring * mesh.shard * (gathers * blocks + state.outside_blocks))
        sent["FSDP: gradients"] = round(passes * ring * all_gradients)
    tokens = passes * estimate.micro_batch * estimator.length
    if mesh.pipeline > 1:
        divided = mesh.tensor if mesh.sequence else 1
        # Each chunk sends forward to the next stage; each but the first one sends backward to the one before.
        times = 2 * mesh.chunks - 1
        sent["pipeline: residual stream"] = times * tokens * shape.width * estimate.itemsize // divided
        tied = (weight for weight in trained if len(stages_of(mesh, shape.layers, weight)) > 1)
        if rows := sum(math.prod(weight.memory_shape) for weight in tied):
            sent["pipeline: tied head"] = 4 * rows // (mesh.tensor * mesh.shard)
    if mesh.tensor > 1:
        ring = (mesh.tensor - 1) / mesh.tensor
        layers = sum(len(blocks) for blocks in stage_blocks(mesh, shape.layers, 0))
        ends = 2 if mesh.pipeline == 1 else 1
        sums = 4 * layers + (2 * layers if engine.activation_checkpointing else 0) + ends
        sent["tensor parallel: residual stream"] = round(2 * ring * sums * tokens * shape.width * estimate.itemsize)
        # The loss exchanges four numbers for each token; weights that are not divided get equal gradients.
        shared = _count(weight for weight in trained if weight.split is None)
        loss = 4 * tokens if mesh.pipeline == 1 else 0
        sent["tensor parallel: loss and norms"] = round(2 * ring * 4 * (loss + shared / mesh.shard))
    return sent


MAX_SECONDS = 60.0
"""A probe ends after this, even if it has done fewer steps."""
ASSUMED_MFU = 0.4
"""The fraction of the peak that training is assumed to reach, if no step can be timed here."""
RECOMPUTE_FACTOR = 4 / 3
"""Activation checkpointing computes the forward pass twice."""


@dataclass(frozen=True)
class Speed:
    """How long a step takes, and how that is known."""

    step_seconds: float
    source: str
    parts: StepTime | None = None


def forecast_speed(engine: EngineConfig, estimator: Estimator, target: Target, estimate: Estimate) -> Speed | None:
    """From the rates of the GPU and its network; None for devices that are not known, DeepSpeed, fp32 and families in
    the user's own file, whose kernels are not known."""
    if target.cluster is None or estimate.itemsize > 2 or not isinstance(engine, TorchEngine | JaxEngine):
        return None
    if find_family_file(estimator.shape.family) is not None:
        return None
    layout = Layout(
        estimate.mesh,
        estimator.length,
        estimate.micro_batch,
        estimate.passes,
        recompute=1.0 if engine.activation_checkpointing else 0.0,
        compiled=isinstance(engine, JaxEngine) or is_compiled(engine, estimate.mesh, target.device),
        fp8=estimate.precision == "fp8",
        muon=estimator.train.optimizer == "muon",
    )
    teachers = teacher_flops(estimator.train.distil, estimator.length)
    found = step_time(estimator.shape, target.cluster, layout, estimator.trained, teachers)
    return Speed(found.total, f"forecast from the rates of a {target.name}", found)


def stated_speed(activation_checkpointing: int, target: Target, flops_per_step: float) -> Speed | None:
    """From the device's peak and the assumed MFU; None if the peak is not known."""
    if target.peak is None:
        return None
    rate = target.devices * target.peak * ASSUMED_MFU
    factor = RECOMPUTE_FACTOR if activation_checkpointing else 1.0
    source = f"assumed: {ASSUMED_MFU:.0%} of {target.peak / 1e12:,.0f} TFLOP/s, nothing was timed"
    return Speed(factor * flops_per_step / rate, source)


def probe_speed(engine: EngineConfig, estimator: Estimator, estimate: Estimate, steps: int) -> Speed:
    """Time real steps of one and of two passes on random tokens: their difference is the time of a pass."""
    shape = estimator.shape
    lora = estimator.lora
    passes = 2 if estimate.passes > 1 else 1
    rows = estimate.micro_batch
    train = estimator.train.model_copy(update={"batch": passes * rows, "batch_rampup": []})
    opened = open_engine(engine.model_copy(update={"micro_batch": rows}), train, shape, lora)
    weights: Any = initial_weights(shape, 0)
    opened.load([*weights, *initial_adapters(shape, lora, 0)] if lora else weights, [], 0, "a probe")

    def fastest(rows: int, end: float) -> float:
        """Seconds of the fastest step: other programs only make steps slower."""
        _step(opened, shape, train, rows, 0)  # the first step compiles
        found = [_step(opened, shape, train, rows, 1)]
        while len(found) < max(2, steps) // passes and time.perf_counter() < end:
            found.append(_step(opened, shape, train, rows, len(found) + 1))
        return min(found)

    try:
        end = time.perf_counter() + MAX_SECONDS
        seconds = one = fastest(rows, end)
        if passes == 2:
            seconds += max(0.0, fastest(2 * rows, end) - one) * (estimate.passes - 1)
    finally:
        opened.close()
    return Speed(seconds, f"timed here: {steps} steps of this net on random tokens")


def _step(engine: Engine, shape: Shape, train: TrainConfig, rows: int, step: int) -> float:
    """Seconds of a step whose loss is on every token, on the fraction that a masked language model predicts, or on the
    two labels of a finetuned head."""
    dice = np.random.default_rng(step)
    ids = dice.integers(0, shape.vocab, (rows, (train.length or shape.positions) + 1)).astype(np.int32)
    labels = ids[:, 1:]
    if label_head_of(shape):
        labels = np.where(np.arange(labels.shape[1]) < 2, np.int32(0), np.int32(IGNORED)) + np.zeros_like(labels)
    elif open_family(shape.family).OBJECTIVE != "next_token":
        labels = np.where(dice.random(labels.shape) < train.masked.probability, labels, np.int32(IGNORED))
    batch = Batch(ids[:, :-1], labels, np.arange(rows))
    began = time.perf_counter()
    _ = engine.train_step(batch, step, 1e-4).loss
    return time.perf_counter() - began


KB = 2**10
MB = 2**20
GB = 2**30
PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "buffers": "communication buffers",
    "activations": "activations",
    "logits": "logits",
}
STEP_PARTS = {"between": "kernels between them", "waiting": "waiting for other devices"}
"""The parts of a step whose names do not say what they are."""


def format_plan(figures: dict[str, Any]) -> str:
    """All parts of a plan, one line for each figure."""
    machine = figures["machine"]
    lines = [f"machine: {machine['devices']} x {machine['device']} with {machine['memory'] / GB:,.1f} GB"]
    if figures["generations"] > 1:
        lines.append(
            f"train.generations={figures['generations']}: the figures are the first one's; with a teacher, which takes "
            "memory for its weights, a step takes up to twice as long"
        )
    lines += ["", *_table("parameters", {**figures["parameters"], "all": sum(figures["parameters"].values())}, "{:,}")]
    if figures["trained"] != sum(figures["parameters"].values()):
        lines.append(f"  trained: {figures['trained']:,}")
    lines += ["", *_memory_lines(figures), "", *_work_lines(figures), "", *_disk_lines(figures)]
    if "fastest" in figures:
        lines += ["", *_fastest_lines(figures)]
    return "\n".join(lines)


def _memory_lines(figures: dict[str, Any]) -> list[str]:
    memory = figures["memory"]
    machine = figures["machine"]
    unit, name = (GB, "GB") if memory["total"] >= GB else (MB, "MB")
    mesh = ", ".join(f"{axis} {size}" for axis, size in memory["mesh"].items() if size > 1)
    how = f"{memory['engine']}, {memory['precision']}, micro-batch {memory['micro_batch']}"
    head = f"memory of each device in {name} ({how}"
    head += f" x {memory['passes']}" if memory["passes"] > 1 else ""
    head += f", {mesh}" if mesh else ""
    head += ", activation checkpointing" if memory["activation_checkpointing"] else ""
    parts = {text: memory[part] / unit for part, text in PARTS.items()}
    lines = _table(head + ")", {**parts, "all": memory["total"] / unit}, "{:,.2f}")
    usable = f"{machine['usable'] / GB:,.1f} GB that tensors can use"
    lines.append(f"  {'fits into' if figures['fits'] else 'DOES NOT FIT into'} the {usable}")
    if memory["host"]:
        lines.append(f"  offloaded to the machine's memory, for each device: {memory['host'] / GB:,.1f} GB")
    if not figures["fits"]:
        near = figures["settings_that_fit"]
        lines.append("  nearest settings that fit:" if near else "  no setting was found that fits; use more devices")
        for fitting in near:
            settings = " ".join(f"{key}={value}" for key, value in fitting["settings"].items())
            host = f", and {fitting['host'] / GB:,.1f} GB of the machine's memory" if fitting["host"] else ""
            lines.append(f"    {settings}   ({fitting['total'] / GB:,.2f} GB{host})")
    return lines


def _work_lines(figures: dict[str, Any]) -> list[str]:
    lines = ["work"]
    tokens = "" if figures["tokens"] is None else f", {figures['tokens']:,} tokens"
    epochs = (
        "" if figures["epochs"] is None else f", {figures['epochs']:.2f} epochs of {figures['train_tokens']:,} tokens"
    )
    unknown = (
        "not known before the text is tokenized; set plan.tokens" if figures["train_tokens"] is None else "not known"
    )
    steps = unknown if figures["steps"] is None else f"{figures['steps']:,}"
    lines.append(f"  steps: {steps}{tokens}{epochs}")
    if figures["flops"] is not None:
        lines.append(f"  operations: {figures['flops']:.3g} FLOPs, {figures['flops_per_token']:.3g} for a token")
    for kind, sent in figures["communication"].items():
        lines.append(f"  each device sends in a step: {format_bytes(sent)} ({kind})")
    if figures["step_seconds"] is None:
        lines.append("  time: not known; set plan.gpu or plan.tflops")
        return lines
    mfu = "" if figures["mfu"] is None else f", MFU {figures['mfu']:.0%}"
    speed = f"{figures['tokens_per_second']:,.0f} tokens/s{mfu}, {figures['step_seconds']:.3g} s for a step"
    lines.append(f"  speed: {speed} ({figures['speed']})")
    if figures["step_parts"]:
        parts = figures["step_parts"].items()
        shares = (f"{STEP_PARTS.get(part, part)} {seconds / figures['step_seconds']:.0%}" for part, seconds in parts)
        lines.append(f"  of a step: {', '.join(shares)}")
    if figures["hours"] is not None:
        lines.append(f"  time: {_format_hours(figures['hours'])}, without evaluation and saving")
    if figures["cost"] is not None:
        lines.append(f"  cost: {figures['cost']:,.2f}, at the price of plan.price")
    return lines


def _fastest_lines(figures: dict[str, Any]) -> list[str]:
    lines = [f"fastest settings that fit {figures['machine']['devices']} devices (forecast)"]
    for one in figures["fastest"]:
        settings = " ".join(f"{key}={str(value).lower()}" for key, value in one["settings"].items())
        lines.append(f"  {settings}   ({one['tokens_per_second']:,.0f} tokens/s, {one['total'] / GB:,.2f} GB)")
    return lines if figures["fastest"] else [*lines, "  none; use more devices"]


def _disk_lines(figures: dict[str, Any]) -> list[str]:
    disk = figures["disk"]
    kept = f"{disk['checkpoints_kept']} kept: {format_bytes(disk['checkpoints'])}"
    lines = ["disk", f"  a checkpoint: {format_bytes(disk['checkpoint'])}; {kept}"]
    if disk["tokens"]:
        lines.append(f"  token store: {format_bytes(disk['tokens'])}")
    return lines


def _table(head: str, values: dict[str, Any], form: str) -> list[str]:
    texts = {name: form.format(value) for name, value in values.items()}
    names = max(map(len, texts))
    figures = max(map(len, texts.values()))
    return [head, *(f"  {name:<{names}}  {text:>{figures}}" for name, text in texts.items())]


def _format_hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} minutes"
    return f"{hours:,.1f} hours" if hours < 48 else f"{hours:,.0f} hours ({hours / 24:,.1f} days)"


def format_bytes(count: float) -> str:
    """A number of bytes in the unit that makes it readable."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "kB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count:,.0f} bytes"


WANTED = 3
"""How many settings are offered."""
MORE_DEVICES = (1, 2, 4, 8, 16)
"""Times the devices."""
STAGES = (1, 2, 4, 8, 16)
"""Of a pipeline."""
OFFLOADED = {"engine.kind": "deepspeed", "engine.zero": 3, "engine.offload_optimizer": "cpu"}


@dataclass(frozen=True)
class Option:
    """Changed settings, the engine that they make, and how far they are from the user's own."""

    settings: dict[str, Any]
    devices: int
    engine: EngineConfig
    distance: float = 0.0

    def estimate(self, estimator: Estimator, target: Target, *, exact: bool) -> Estimate | None:
        """What the run takes; None if it does not fit, or if this batch, net or mesh cannot be divided so."""
        try:
            found = estimator.estimate(self.engine, self.devices, target.device, exact=exact)
        except TextmillError:
            return None
        refused = found.mesh.pipeline > 1 and found.precision == "fp16"  # by `auto` too, on an old GPU
        return found if found.memory.total <= target.usable and not refused else None


def nearest_fitting(engine: EngineConfig, estimator: Estimator, target: Target) -> list[dict[str, Any]]:
    """Up to three settings that fit, the nearest first; none is another one with further changes."""
    found: list[dict[str, Any]] = []
    micro_batch = estimator.estimate(engine, target.devices, target.device, exact=False).micro_batch
    options = _options(engine, estimator.train, target.devices, micro_batch)
    for option in sorted(options, key=lambda option: option.distance):
        if any(_is_more(option.settings, one["settings"]) for one in found):
            continue
        if option.estimate(estimator, target, exact=False) and (
            exact := option.estimate(estimator, target, exact=True)
        ):
            found.append({"settings": option.settings, "total": exact.memory.total, "host": exact.host})
        if len(found) == WANTED:
            break
    return found


def _is_more(settings: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether settings are others with further changes, or differ only in a smaller micro-batch or more devices."""
    loose = {"engine.micro_batch", "plan.devices"}
    firm, other_firm = ({key: value for key, value in one.items() if key not in loose} for one in (settings, other))
    return other.items() <= settings.items() or firm == other_firm


def _options(own: EngineConfig, train: TrainConfig, own_devices: int, micro_batch: int) -> Iterator[Option]:
    """More devices, activation checkpointing, smaller micro-batches, other meshes, offload: all combinations."""
    can_offload = train.optimizer == "adamw" and train.ema_window is None and not isinstance(own, JaxEngine)
    for times, checkpointing, micro in product(
        MORE_DEVICES, dict.fromkeys((own.activation_checkpointing, 1)), _halvings(micro_batch)
    ):
        changed: dict[str, Any] = {"plan.devices": own_devices * times} if times > 1 else {}
        distance = 2.0 * math.log2(times) + 0.4 * math.log2(micro_batch / micro)
        if checkpointing != own.activation_checkpointing:
            changed["engine.activation_checkpointing"] = checkpointing
            distance += 1
        if micro != own.micro_batch:  # named even if it stays: `auto` might choose another one
            changed["engine.micro_batch"] = micro
        values: dict[str, Any] = {"activation_checkpointing": checkpointing, "micro_batch": micro}
        for mesh in _meshes(own, own_devices * times):
            settings = {key: value for key, value in _mesh_settings(mesh).items() if value != _value(own, key)}
            further = sum(1.0 + 0.2 * abs(math.log2(value / _value(own, key))) for key, value in settings.items())
            further += 0.5 * len({"engine.mesh.tensor", "engine.mesh.pipeline"} & settings.keys())
            update = values | ({"mesh": mesh} if mesh else {})
            engine = own.model_copy(update=update)
            yield Option({**changed, **settings}, own_devices * times, engine, distance + further)
        if can_offload:
            already = isinstance(own, DeepSpeedEngine) and own.zero == 3
            engine = DeepSpeedEngine(zero=3, offload_optimizer="cpu", **values)
            yield Option({**changed, **OFFLOADED}, own_devices * times, engine, distance + (2.0 if already else 4.0))


def _meshes(own: EngineConfig, devices: int) -> Iterator[MeshConfig | None]:
    """Meshes of the torch engine: powers of two, and the number of devices itself, as shards, tensor-parallel ranks and
    stages; other engines keep their own. FSDP would gather the blocks of a stage for each micro-batch, so the two are
    combined only if the user's own mesh has both."""
    if not isinstance(own, TorchEngine):
        yield None
        return
    sizes = sorted({devices, *(1 << power for power in range(devices.bit_length()))})
    for pipeline, tensor, shard in product(STAGES, (1, 2, 4, 8), sizes):
        combines = shard == 1 or pipeline in (1, own.mesh.pipeline)
        if combines and devices % (shard * tensor * pipeline) == 0:
            axes = {"replicate": None, "shard": shard, "tensor": tensor, "pipeline": pipeline}
            yield own.mesh.model_copy(update=axes)


def _mesh_settings(mesh: MeshConfig | None) -> dict[str, int]:
    return {f"engine.mesh.{axis}": getattr(mesh, axis) for axis in ("shard", "tensor", "pipeline")} if mesh else {}


def _value(engine: EngineConfig, key: str) -> int:
    value: int = getattr(engine.mesh, key.rpartition(".")[2]) if isinstance(engine, TorchEngine) else 1
    return value


def _halvings(micro: int) -> list[int]:
    """A number, its half, a quarter ... as long as they are whole, and 1."""
    found = [micro]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return list(dict.fromkeys([*found, 1]))


def fastest_fitting(own: EngineConfig, estimator: Estimator, target: Target) -> list[dict[str, Any]]:
    """The fastest meshes that fit, each with its fastest micro-batch, with or without activation checkpointing."""
    if not isinstance(own, TorchEngine):
        raise TextmillError(f"--best: searches settings of engine.kind=torch, found {own.kind}; set engine.kind=torch")
    if target.cluster is None:
        raise TextmillError(
            f"--best: the rates of '{target.name}' are not known; set plan.gpu to one of {', '.join(GPUS)}"
        )
    found: list[tuple[float, Option]] = []
    batch = estimator.train.batch
    for mesh, checkpointing in product(_variants(own, target.devices), (0, 1)):
        rates = []
        for micro in _doublings(batch // (target.devices // (mesh.tensor * mesh.pipeline))):
            engine = own.model_copy(
                update={"mesh": mesh, "micro_batch": micro, "activation_checkpointing": checkpointing}
            )
            settings: dict[str, Any] = {  # all that the search chooses, so that none of the user's own stays
                **_mesh_settings(mesh),
                **({"engine.mesh.keep_gathered": mesh.keep_gathered} if mesh.shard > 1 else {}),
                **({"engine.mesh.schedule": mesh.schedule} if mesh.pipeline > 1 else {}),
                "engine.micro_batch": micro,
                "engine.activation_checkpointing": checkpointing,
            }
            if mesh.pipeline == own.mesh.pipeline == 1:
                del settings["engine.mesh.pipeline"]
            option = Option(settings, target.devices, engine)
            if (estimate := option.estimate(estimator, target, exact=False)) is None:
                break
            speed = forecast_speed(engine, estimator, target, estimate)
            if speed is None:
                raise TextmillError(
                    "--best: there is no forecast for fp32 and for a family in a file of your own; "
                    f"set engine.precision={target.device.precision}, or another model.family"
                )
            rates.append((batch * estimator.length / speed.step_seconds, option))
        found += [max(rates, key=lambda one: one[0])] if rates else []
    fastest: list[dict[str, Any]] = []
    for rate, option in sorted(found, key=lambda one: -one[0]):
        if exact := option.estimate(estimator, target, exact=True):
            total = exact.memory.total
            fastest.append({"settings": option.settings, "tokens_per_second": rate, "total": total})
        if len(fastest) == WANTED:
            break
    return fastest


def _variants(own: TorchEngine, devices: int) -> Iterator[MeshConfig]:
    """All meshes, with and without weights that stay gathered, and with both schedules of a pipeline that differ in
    speed."""
    for mesh in _meshes(own, devices):
        assert mesh is not None
        for keep in (False, True) if mesh.shard > 1 else (False,):
            for schedule in ("1f1b", "interleaved") if mesh.pipeline > 1 else ("1f1b",):
                yield mesh.model_copy(update={"keep_gathered": keep, "schedule": schedule})


def _doublings(most: int) -> list[int]:
    """1, 2, 4 ... as far as they divide a rank's samples, and all of them."""
    powers = [1 << power for power in range(most.bit_length()) if most % (1 << power) == 0]
    return list(dict.fromkeys([*powers, most])) if most else []
