"""Tensor parallelism: ranks divide heads, MLP columns and vocabulary rows, and all-reduce the outputs (as Megatron-LM).

`divide_net` replaces modules of a net by this rank's parts. Of a GPT-2 of width 768 with 12 heads, a rank of two has:

    wte             25,152 of 50,304 rows     VocabularyEmbedding    Weight.split 0, by_token
    attn.c_attn      1,152 of 2,304 outputs   nn.Linear              Weight.split 0 (column-parallel): 6 heads
    attn.c_proj        384 of 768 inputs      RowLinear              Weight.split 1 (row-parallel)
    mlp.c_fc         1,536 of 3,072 outputs   nn.Linear              Weight.split 0
    mlp.c_proj       1,536 of 3,072 inputs    RowLinear              Weight.split 1
    norms, wpe      in full                                          Weight.split None

A block all-reduces after each row-parallel matrix in forward, and before each column-parallel one in backward.

Shapes in names: N samples, T tokens, E width, V rows of the vocabulary that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.errors import TextmillError
from textmill.models import Weight
from textmill.models.base_torch import AdaptedLinear, AttentionDropout, BaseNet, Dropout

Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TensorParallel:
    """One tensor-parallel group. With `sequence` its ranks divide the tokens of the residual stream.

    The collectives return new tensors: with one that writes in place, a net compiled by torch 2.11 loses the gradients
    of what is before it (pytorch issue 180642).
    """

    group: Any
    rank: int
    count: int
    sequence: bool

    def to_parallel_region(self, x_NTE: Tensor) -> Tensor:
        """From the residual stream into divided matrices: all tokens; backward sums the ranks' gradients."""
        forward, backward = (self.gather, self.reduce_scatter) if self.sequence else (_identity, self.all_reduce)
        out: Tensor = _Collective.apply(x_NTE, forward, backward)  # type: ignore[no-untyped-call]
        return out

    def from_parallel_region(self, x_NTE: Tensor) -> Tensor:
        """Back to the residual stream: the sum over ranks; with `sequence`, only this rank's tokens of it."""
        forward, backward = (self.reduce_scatter, self.gather) if self.sequence else (self.all_reduce, _identity)
        out: Tensor = _Collective.apply(x_NTE, forward, backward)  # type: ignore[no-untyped-call]
        return out

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        return collective("all_reduce", x, "sum", self.group.group_name)

    def gather(self, x_NTE: Tensor) -> Tensor:
        """All ranks' tokens, in rank order."""
        parts = collective("all_gather_into_tensor", x_NTE, self.count, self.group.group_name)
        return parts.view(self.count, *x_NTE.shape).movedim(0, 1).flatten(1, 2)

    def reduce_scatter(self, x_NTE: Tensor) -> Tensor:
        """This rank's tokens of the sum over ranks."""
        samples, tokens, width = x_NTE.shape
        parts = x_NTE.reshape(samples, self.count, tokens // self.count, width).movedim(1, 0).flatten(0, 1)
        return collective("reduce_scatter_tensor", parts, "sum", self.count, self.group.group_name)


class _Collective(torch.autograd.Function):
    """One collective in forward, another for the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.run_backward = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run_backward(gradient), None, None


def collective(name: str, x: Tensor, *arguments: Any) -> Tensor:
    """A functional collective of torch: its result, in a new tensor."""
    operations = torch.ops._c10d_functional
    values: Tensor = operations.wait_tensor(getattr(operations, name)(x.contiguous(), *arguments))
    return values


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


class RowLinear(nn.Linear):
    """A matrix whose input features are divided over ranks; its bias is added once, after the all-reduce."""

    def __init__(self, linear: nn.Linear, tensor: TensorParallel) -> None:
        super().__init__(linear.in_features // tensor.count, linear.out_features, bias=linear.bias is not None)
        self.tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        return _add_bias(self.tensor.from_parallel_region(F.linear(x, self.weight)), self.bias)


class RowAdapted(AdaptedLinear):
    """`RowLinear` with a LoRA adapter, whose input features are divided too."""

    def __init__(self, full: AdaptedLinear, tensor: TensorParallel) -> None:
        linear = nn.Linear(full.in_features // tensor.count, full.out_features, bias=full.bias is not None)
        super().__init__(linear, full.lora, full.site)
        self.tensor = tensor

    def forward(self, x: Tensor, dropout_keys_N: Tensor | None = None) -> Tensor:
        partial = F.linear(x, self.weight)
        partial = partial + self.adapter_output(x, dropout_keys_N, (self.tensor.rank, self.tensor.count))
        return _add_bias(self.tensor.from_parallel_region(partial), self.bias)


def _add_bias(total: Tensor, bias: Tensor | None) -> Tensor:
    return total if bias is None else total + bias.to(total.dtype)


class VocabularyEmbedding(nn.Embedding):
    """This rank's rows of an embedding; tokens of other ranks are zero before the all-reduce."""

    def __init__(self, embedding: nn.Embedding, tensor: TensorParallel) -> None:
        rows = -(-embedding.num_embeddings // tensor.count)
        super().__init__(rows, embedding.embedding_dim)
        self.tensor = tensor
        self.begin = rows * tensor.rank

    def forward(self, ids_NT: Tensor) -> Tensor:
        rows_NT = ids_NT - self.begin
        is_here_NT = (rows_NT >= 0) & (rows_NT < self.num_embeddings)
        x_NTE = super().forward(rows_NT.where(is_here_NT, 0)) * is_here_NT[..., None]
        return self.tensor.from_parallel_region(x_NTE)


class PositionEmbedding(nn.Embedding):
    """Embeddings of positions or segments, of this rank's tokens only, for sequence parallelism."""

    def __init__(self, embedding: nn.Embedding, tensor: TensorParallel) -> None:
        super().__init__(embedding.num_embeddings, embedding.embedding_dim)
        self.tensor = tensor

    def forward(self, positions: Tensor) -> Tensor:
        return super().forward(positions.chunk(self.tensor.count, -1)[self.tensor.rank])


def divide_net(net: BaseNet, tensor: TensorParallel) -> None:
    """Replace modules of a net on the meta device by this rank's parts of them, as `Weight.split` defines."""
    for module in _replace_modules(net, tensor):
        if module is net or any(module is block for block in net.blocks):
            raise TextmillError(
                f"engine.mesh.tensor: {net.shape.family} has divided matrices directly in a {type(module).__name__}; "
                f"give them a module of their own (attention, MLP) whose first argument is their input"
            )
        module.register_forward_pre_hook(lambda _, inputs: (tensor.to_parallel_region(inputs[0]), *inputs[1:]))
    for module in net.modules():  # dropout needs positions in the full tensor
        if isinstance(module, Dropout):
            module.part = tensor.rank if tensor.sequence or isinstance(module, AttentionDropout) else 0
    net.register_forward_hook(
        lambda _net, _inputs, settings, x_NTE: (
            tensor.to_parallel_region(x_NTE) if net.ends_with(settings.get("blocks")) else x_NTE
        ),
        with_kwargs=True,
    )


def _replace_modules(net: BaseNet, tensor: TensorParallel) -> list[nn.Module]:
    """Replace the divided modules by this rank's parts; return those, such as an MLP, whose input all ranks need."""
    column_parallel: dict[nn.Module, None] = {}  # in order, each once
    for weight in net.shape.weights():
        module_name, _, parameter_name = weight.parameter.rpartition(".")
        if weight.by_token and len(weight.shape) == 1 and weight.split == 0:  # the head's bias
            rows = -(-weight.outputs // tensor.count)
            setattr(net.get_submodule(module_name), parameter_name, nn.Parameter(torch.empty(rows)))
        if parameter_name != "weight" or len(weight.shape) != 2:
            continue
        part = _part_of(net.get_submodule(module_name), weight, tensor)
        if part is None:
            continue
        parent_name, _, attribute = module_name.rpartition(".")
        parent = net.get_submodule(parent_name)
        setattr(parent, attribute, part)
        if weight.split == 0 and not weight.by_token:
            column_parallel[parent] = None
    return list(column_parallel)


def _part_of(module: nn.Module, weight: Weight, tensor: TensorParallel) -> nn.Module | None:
    """This rank's part of a module; None if every rank has the full module."""
    if isinstance(module, nn.Embedding):
        if weight.by_token and weight.split == 0:
            return VocabularyEmbedding(module, tensor)
        return PositionEmbedding(module, tensor) if tensor.sequence and not weight.by_token else None
    if weight.split is None or not isinstance(module, nn.Linear):
        return None
    if weight.split == 1:
        return RowAdapted(module, tensor) if isinstance(module, AdaptedLinear) else RowLinear(module, tensor)
    outputs = -(-module.out_features // tensor.count)
    part = nn.Linear(module.in_features, outputs, bias=module.bias is not None)
    return AdaptedLinear(part, module.lora, module.site) if isinstance(module, AdaptedLinear) else part
