"""Forecast: seconds of a training step on GPUs that are not here, from a roofline of its kernels and its traffic.

A kernel takes as long as its operations at the GPU's peak or its bytes at the memory's bandwidth, over a fraction of
them that was measured on one H200 (`bench/LOG.md`, "Where the time of a training step goes") and is taken to be the
same on other GPUs. GPT-2 of 124M on one H200, 64 x 1,024 tokens, compiled:

    part of the step                               work               rate            ms
    matmuls: 6 x 124M x 65,536 tokens              48.6 TFLOP         0.72 PFLOP/s    67
    attention                                      4.3 TFLOP and softmax              19
    kernels between matmuls, and the loss          52 GB              3.6 TB/s        15
    AdamW and casts of the weights                 5 GB               3.6 TB/s         2

Collectives are rings. FSDP gathers a block while the one before computes, gradients are summed while backward goes on,
and tensor parallelism waits for each of its sums. What does not overlap is `waiting`.

Of a pipeline the slowest stage counts, and it waits for its transfers and for the micro-batches with which the others
begin and end. With s equal stages and m micro-batches that bubble is (s - 1) / m of the time, interleaved in v chunks
(s - 1) / (v m) (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
2021, sections 2.2.1 and 2.2.2).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache

from textmill.devices import GPUS
from textmill.engines.meshes import Mesh, stages_of
from textmill.models import Shape, Weight, open_family
from textmill.models.bert.family import LABELLED

BEST_MATMUL = {"A100": 0.869, "A800": 0.869, "GH200": 0.838, "B200": 0.776, "MI300X": 0.514}
"""The fraction of its peak that the best of many matmuls reaches, as published ("Maximum achievable matmul FLOPS",
github.com/stas00/ml-engineering, compute/accelerator): newer GPUs lower their clock, since power is their limit."""
HOPPER_BEST = 0.803
"""The same for H100 and H200, and taken for all others."""

MATMUL = 0.91
"""Of the best matmul's rate: all matmuls of a step on an H200, small and medium, without their last waves."""
TILE = (128, 256)
"""Outputs of a matmul that a multiprocessor computes at once."""
MEMORY = 0.75
"""Of the memory's bandwidth: kernels between matmuls, loss and optimizer."""
ATTENTION_FORWARD = 1.05
ATTENTION_BACKWARD = 1.9
"""Times the matmuls and exponentials of attention, one after the other; heads of 64, 1,024 tokens."""
EXTRA_KEYS = 192
"""What a tile of queries costs on top of its keys: half of the masked last tile, and until the kernel is at full speed.
cuDNN's rates at 1,024 to 16,384 tokens follow such a law (github.com/Dao-AILab/flash-attention/pull/2605)."""
EXPONENTIALS = 16
"""Exponentials of a multiprocessor in a cycle."""
ACTIVATION_BYTES = 4.0
"""Bytes that kernels between matmuls move in forward and backward, for each input and output of a matmul and token."""
FORWARD_SHARE = 0.4
"""Of these bytes in the forward pass."""
EAGER = 3.7
"""Times as many bytes if the net is not compiled (small and medium under DeepSpeed, which is not compiled)."""
LOGIT_BYTES = 4.0
"""The loss reads a logit and writes its gradient, in bf16."""
ADAMW_BYTES = 32.0
"""Of a weight: three numbers read and written, its gradient read twice."""
PASS_BYTES = 12.0
"""Of a weight in each pass: cast to bf16, and its gradient added."""
NEWTON_SCHULZ = 5
"""Iterations of Muon."""
GAPS = 1.10
"""A step is longer than the sum of these kernels: small ones, and pauses between them. From tokens/s of 2026-11-18:
small 582,900 and Llama 556,400, both on two hosts, medium 210,600."""
FP8 = 1.09
"""How much faster a step is in fp8 (medium, large and xl)."""
LINK = 0.8
NETWORK = 0.75
"""Of the bandwidth of links inside a machine and of the network between machines: what collectives reach, as published
(github.com/stas00/ml-engineering, network: 82% and 73%)."""
HOP_SECONDS = 3e-6
"""A step of a ring; not measured."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind, in machines with `per_node` of them. Rates of one GPU; bytes per second in one direction."""

    flops: float
    best_matmul: float
    memory: float
    multiprocessors: int
    exponentials: float
    link: float
    network: float
    per_node: int


def cluster_of(gpu: str, flops: float, per_node: int, network: float | None = None) -> Cluster:
    """The cluster of a known GPU; `network` in bytes per second.

    The network of a GPU is a ninth of its link unless given, as in a DGX H100.
    """
    rates = GPUS[gpu]
    link = 1e9 * rates.link_gb_s
    exponentials = EXPONENTIALS * rates.multiprocessors * rates.mhz * 1e6
    best = BEST_MATMUL.get(gpu, HOPPER_BEST)
    memory = 1e9 * rates.memory_gb_s
    return Cluster(flops, best, memory, rates.multiprocessors, exponentials, link, network or link / 9, per_node)


@dataclass(frozen=True)
class Layout:
    """How a step is divided and computed."""

    mesh: Mesh
    length: int
    micro_batch: int
    passes: int = 1
    recompute: float = 0.0
    """The fraction of the blocks' forward matmuls that backward computes again; 1: activation checkpointing."""
    compiled: bool = True
    fp8: bool = False
    muon: bool = False
    gather_bytes: int = 4
    """Of a weight that FSDP gathers."""
    reduce_bytes: int = 4
    """Of a gradient that data-parallel ranks sum."""
    optimizer_ranks: int = 1
    """Replicas that share the work of the optimizer (ZeRO-1)."""

    @property
    def tokens(self) -> int:
        """Of one pass of a rank."""
        return self.micro_batch * self.length


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part."""

    matmuls: float
    attention: float
    between: float
    """Norms, activations and everything else between matmuls, and casts of weights."""
    loss: float
    optimizer: float
    waiting: float
    """For other ranks: communication that does not overlap."""

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return float(sum(asdict(self).values()))


def step_time(
    shape: Shape, cluster: Cluster, layout: Layout, trained: Iterable[Weight] | None = None, extra_flops: float = 0.0
) -> StepTime:
    """The forecast for one step; `extra_flops` are other matmuls for a token, such as those of teachers."""
    every = _weights_of(shape)
    names = {weight.name for weight in (every if trained is None else trained)}
    blocks = [weight for weight in every if 1 <= weight.depth <= shape.layers]
    tensor = layout.mesh.tensor
    causal = open_family(shape.family).OBJECTIVE == "next_token"
    forward = gradients = between = 0.0
    for weight in blocks:
        if len(weight.memory_shape) != 2:
            continue
        rows, inner, columns = _rank_sizes(weight, layout)
        once = matmul_seconds(cluster, rows, inner, columns)
        forward += once
        gradients += matmul_seconds(cluster, rows, columns, inner)
        gradients += (weight.name in names) * matmul_seconds(cluster, columns, rows, inner, split_sums=True)
        between += ACTIVATION_BYTES * rows * (inner + columns)
    between *= (1.0 if layout.compiled else EAGER) / (MEMORY * cluster.memory)
    attention_forward, attention_backward = attention_seconds(shape, cluster, layout, causal=causal)

    head = head_seconds(shape, every, cluster, layout, names, causal=causal)
    logits = layout.tokens * (1.0 if causal else LABELLED) * shape.padded_vocab / tensor
    loss = LOGIT_BYTES * logits / (MEMORY * cluster.memory)
    again = layout.recompute * forward
    again_attention = attention_forward if layout.recompute >= 1 else 0.0
    between_forward = FORWARD_SHARE * between
    between += between_forward if layout.recompute else 0.0
    block_forward = (forward + attention_forward + between_forward) / shape.layers
    block_backward = (again + gradients + again_attention + attention_backward) / shape.layers
    block_backward += (between - between_forward) / shape.layers
    casts = PASS_BYTES * sum(weight.size for weight in blocks) / tensor / (MEMORY * cluster.memory)
    extra = extra_flops * layout.tokens / (MATMUL * cluster.best_matmul * cluster.flops)
    gaps = GAPS / (FP8 if layout.fp8 else 1.0)

    mesh = layout.mesh
    on_stages: list[list[Weight]] = [[] for _ in range(mesh.pipeline)]
    for weight in every:
        for stage in stages_of(mesh, shape.layers, weight):
            on_stages[stage].append(weight)
    block = block_forward + block_backward + casts / shape.layers
    passes = [
        gaps * block * _layers_in(shape, here)
        + waiting_in_pass(shape, here, cluster, layout, block_forward, block_backward)
        for here in on_stages
    ]
    passes[-1] += gaps * (head + loss + extra)
    slowest = passes.index(max(passes))
    here = on_stages[slowest]
    part = _layers_in(shape, here) / shape.layers
    is_last = slowest == mesh.pipeline - 1
    scale = layout.passes * gaps
    waiting = waiting_seconds(shape, here, cluster, layout, block_forward, block_backward)
    return StepTime(
        matmuls=scale * (part * (forward + again + gradients) + is_last * (head + extra)),
        attention=scale * part * (attention_forward + again_attention + attention_backward),
        between=scale * part * (between + casts),
        loss=scale * is_last * loss,
        optimizer=optimizer_seconds([weight for weight in here if weight.name in names], cluster, layout),
        waiting=waiting + bubble_seconds(passes, mesh.chunks),
    )


def _layers_in(shape: Shape, weights: list[Weight]) -> int:
    """How many blocks these weights belong to."""
    return len({weight.depth for weight in weights if 1 <= weight.depth <= shape.layers})


def bubble_seconds(passes: list[float], chunks: int) -> float:
    """How long the slowest stage of a pipeline waits for others in a step: until the first micro-batch has passed those
    before it, and at the end; given is the time of a micro-batch in each stage."""
    return (sum(passes) - max(passes)) / chunks


@lru_cache(maxsize=2)
def _weights_of(shape: Shape) -> list[Weight]:
    """Kept, since a search forecasts many layouts of one net."""
    return shape.weights()


def _rank_sizes(weight: Weight, layout: Layout) -> tuple[int, int, int]:
    """Tokens, inputs and outputs of a matrix on one tensor-parallel rank."""
    tensor = layout.mesh.tensor
    outputs, inputs = weight.memory_shape
    return (
        layout.tokens,
        -(-inputs // tensor) if weight.split == 1 else inputs,
        (-(-outputs // tensor) if weight.split == 0 else outputs),
    )


def matmul_seconds(cluster: Cluster, rows: int, inner: int, columns: int, *, split_sums: bool = False) -> float:
    """Rows x inner times inner x columns, in bf16. Its last wave of tiles may leave multiprocessors idle; `split_sums`:
    the sums over `inner` are long enough to be divided, so that none is."""
    rate = MATMUL * cluster.best_matmul * cluster.flops
    computing = 2.0 * rows * inner * columns / rate
    if not split_sums:
        tiles = -(-rows // TILE[0]) * -(-columns // TILE[1])
        waves = tiles / cluster.multiprocessors
        computing *= -(-tiles // cluster.multiprocessors) / waves
    moving = 2.0 * (rows * inner + inner * columns + rows * columns) / (MEMORY * cluster.memory)
    return max(computing, moving)


def head_seconds(
    shape: Shape, every: list[Weight], cluster: Cluster, layout: Layout, names: set[str], *, causal: bool
) -> float:
    """Logits and their gradients; a masked language model computes those of labelled tokens only."""
    tables = [weight for weight in every if weight.by_token and not weight.looked_up]
    if not tables:
        return 0.0
    rows = round(layout.tokens * (1.0 if causal else LABELLED))
    columns = -(-shape.padded_vocab // layout.mesh.tensor)
    once = matmul_seconds(cluster, rows, shape.width, columns)
    return once + matmul_seconds(cluster, rows, columns, shape.width) + (tables[-1].name in names) * once


def attention_seconds(shape: Shape, cluster: Cluster, layout: Layout, *, causal: bool) -> tuple[float, float]:
    """Scores, softmax and weighted values of all layers, forward and backward: 2 and 5 matmuls for each pair."""
    heads = -(-shape.heads // layout.mesh.tensor)
    head_width = getattr(shape, "head_width", shape.width // shape.heads)
    keys = (layout.length / 2 if causal else layout.length) + EXTRA_KEYS
    pairs = shape.layers * heads * layout.tokens * keys
    one = 2.0 * pairs * head_width / (MATMUL * cluster.best_matmul * cluster.flops)
    softmax = pairs / cluster.exponentials
    return ATTENTION_FORWARD * (2 * one + softmax), ATTENTION_BACKWARD * (5 * one + softmax)


def optimizer_seconds(trained: list[Weight], cluster: Cluster, layout: Layout) -> float:
    """The update of this rank's weights, which memory limits, and Muon's matmuls.

    Ranks that have parts of the matrices divide Muon's matmuls between all of them; others compute the same.
    """
    mesh = layout.mesh
    ranks = mesh.shard * mesh.tensor * layout.optimizer_ranks
    seconds = ADAMW_BYTES * sum(weight.size for weight in trained) / ranks / (MEMORY * cluster.memory)
    if layout.muon:
        owners = mesh.data_ranks * mesh.tensor if mesh.shard * mesh.tensor > 1 else layout.optimizer_ranks
        for weight in trained:
            if weight.muon:
                large, small = max(weight.memory_shape), min(weight.memory_shape)
                flops = NEWTON_SCHULZ * (4.0 * small**2 * large + 2.0 * small**3)
                seconds += flops / owners / (MATMUL * cluster.best_matmul * cluster.flops)
    return seconds


def ring_seconds(cluster: Cluster, size: float, ranks: int, stride: int) -> float:
    """An all-gather or reduce-scatter of `size` bytes over every `stride`-th rank; an all-reduce takes twice as long.

    The ranks of one machine send to the next machine over all of their network cards.
    """
    if ranks == 1:
        return 0.0
    in_node = max(1, min(ranks, cluster.per_node // stride))
    nodes = -(-ranks // in_node)
    inside = (ranks - 1) / ranks * size / (LINK * cluster.link) if in_node > 1 else 0.0
    between = (nodes - 1) / nodes * size / (in_node * NETWORK * cluster.network)
    return max(inside, between) + (ranks - 1) * HOP_SECONDS


def waiting_seconds(
    shape: Shape, every: list[Weight], cluster: Cluster, layout: Layout, block_forward: float, block_backward: float
) -> float:
    """Communication that computing does not hide, in a step of a rank with the weights `every`; seconds of a block in a
    pass are given."""
    mesh = layout.mesh
    waiting = layout.passes * waiting_in_pass(shape, every, cluster, layout, block_forward, block_backward)
    if mesh.replicate > 1:
        layers = _layers_in(shape, every)
        block_backward += 2 * tensor_sum_seconds(shape, cluster, layout)
        stride = mesh.tensor * mesh.shard
        size = layout.reduce_bytes * sum(weight.size for weight in every) / mesh.tensor / mesh.shard
        reduce_all = 2 * ring_seconds(cluster, size, mesh.replicate, stride)
        hidden = (layers - 1) * block_backward
        if mesh.local:  # between two steps, where nothing is computed
            waiting += reduce_all / mesh.local.every
        else:
            waiting += max(reduce_all - hidden, reduce_all / layers)
    if layout.muon and mesh.shard * mesh.tensor > 1:  # gradients to the owners of matrices, and changes from them
        matrices = sum(weight.size for weight in every if weight.muon)
        waiting += 2 * ring_seconds(cluster, 4.0 * matrices, mesh.data_ranks * mesh.tensor, 1)
    return waiting


def waiting_in_pass(
    shape: Shape, every: list[Weight], cluster: Cluster, layout: Layout, block_forward: float, block_backward: float
) -> float:
    """The part of it that each pass has: tensor parallelism, FSDP, and transfers to and from other stages."""
    mesh = layout.mesh
    layers = _layers_in(shape, every)
    waiting = 0.0
    if mesh.tensor > 1:
        ends = 2 if mesh.pipeline == 1 else 1
        sums = 4 * layers + (2 * layers if layout.recompute >= 1 else 0) + ends
        one = tensor_sum_seconds(shape, cluster, layout)
        waiting += sums * one
        block_forward += 2 * one
        block_backward += 2 * one
    if mesh.shard > 1:
        block = sum(weight.size for weight in every if 1 <= weight.depth <= shape.layers) / layers / mesh.tensor
        rest = sum(weight.size for weight in every if not 1 <= weight.depth <= shape.layers) / mesh.tensor
        gather, reduce = (
            [ring_seconds(cluster, bytes_ * size, mesh.shard, mesh.tensor) for size in (block, rest)]
            for bytes_ in (layout.gather_bytes, layout.reduce_bytes)
        )
        again = 0.0 if mesh.keep_gathered else gather[0]
        backward = again + reduce[0]
        late = (layers - 1) * (max(0.0, gather[0] - block_forward) + max(0.0, backward - block_backward))
        # Nothing is beside the first gathers of forward and backward, and the last sums.
        waiting += gather[1] + gather[0] + again + late + reduce[0] + reduce[1]
    return waiting + 2 * mesh.chunks * transfer_seconds(shape, cluster, layout)


def tensor_sum_seconds(shape: Shape, cluster: Cluster, layout: Layout) -> float:
    """An all-reduce of the residual stream between tensor-parallel ranks, or the two collectives that replace it."""
    return 2 * ring_seconds(cluster, 2.0 * layout.tokens * shape.width, layout.mesh.tensor, 1)


def transfer_seconds(shape: Shape, cluster: Cluster, layout: Layout) -> float:
    """The residual stream of a micro-batch from one stage to the next, over the network if any two stages need it."""
    mesh = layout.mesh
    if mesh.pipeline == 1:
        return 0.0
    size = 2.0 * layout.tokens * shape.width / (mesh.tensor if mesh.sequence else 1)
    rate = LINK * cluster.link if mesh.world <= cluster.per_node else NETWORK * cluster.network
    return size / rate + HOP_SECONDS
