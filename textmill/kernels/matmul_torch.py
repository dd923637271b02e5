"""Matrix products of training, on a GPU each by the fastest of the ways that cuBLAS proposes, found by trying them.

The library's first proposal is the fastest for a card that is cool. One that trains is held at its power limit, and other tiles then do
the same work with less: on an H200 they take 5 to 20% off most products of a GPT-2. So the card is warmed first, and the fastest few of
short trials, and of those that differ from them by an order of tiles, have longer ones. What is chosen is kept for other runs
(choices.py). Two ways differ in rounding, and so may runs on cards of another kind, and processes that choose at the same time.
`engine.deterministic` leaves all products to torch.
The loss chooses for the head's products always, a net for its own where it is compiled. Shapes in names: M rows, E inputs, F outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.kernels.cublaslt import KINDS, WORKSPACE, Form, Product, Way, card, library
from textmill.kernels.matmul_cache import keep, kept

SMALL = 1e10
"""Operations below which a product is torch's: nothing is to be gained there."""
HEAT, TRY, TURN = 1.0, 0.006, 0.04
"""Seconds of work before the first trial, so that the card is as warm as it will be; of a first trial, and of a turn among the few."""
FEW = 4
"""Ways that are fast enough in the first trials for their kin to be tried, and then for two turns, beside torch's."""
WORTH = 0.99
"""What part of torch's time another way may take at most to be chosen."""
ALIGNED = 256
"""Bytes at which matrices begin, as the library takes for granted."""

Choice = tuple[Product, Way] | None
"""How a product is made; None: by torch."""
Trial = tuple[Choice, Callable[[], None]]
"""A way, and a product made in it."""
_choices: dict[tuple[Form, torch.device], Choice] = {}
_warm: set[torch.device] = set()


def are_chosen(x_NTE: Tensor, weight_FE: Tensor) -> bool:
    """Whether a linear layer's products are to be chosen: where it is compiled for training on a GPU, and not small."""
    trains = x_NTE.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()
    return trains and 2 * x_NTE.numel() * len(weight_FE) >= SMALL


def linear(x_NTE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
    """As torch's own, autocast too."""
    return (
        _linear(x_NTE, weight_FE, bias_F, None) if are_chosen(x_NTE, weight_FE) else F.linear(x_NTE, weight_FE, bias_F)
    )


def add_linear(stream_NTF: Tensor, layer: nn.Linear, x_NTE: Tensor) -> Tensor:
    """A stream and what a layer makes of x, whose bias has its gradient from elsewhere: it is the stream's, summed."""
    return _linear(x_NTE, layer.weight, layer.bias.detach(), stream_NTF)


def _linear(x_NTE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_NTF: Tensor | None) -> Tensor:
    device = x_NTE.device.type
    kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_NTE.dtype
    stream_MF = None if stream_NTF is None else stream_NTF.to(kind).flatten(0, -2)
    y_MF: Tensor = Linear.apply(x_NTE.to(kind).flatten(0, -2), weight_FE, bias_F, stream_MF)  # type: ignore[no-untyped-call]
    return y_MF.view(*x_NTE.shape[:-1], -1)


class Linear(torch.autograd.Function):
    """A linear layer in the precision of its inputs, added to a stream; the weights' gradients leave their products in the weights' own."""

    @staticmethod
    def forward(ctx: Any, x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
        """x W' + bias + stream."""
        kind, ctx.kind = x_ME.dtype, weight_FE.dtype
        weight_FE = weight_FE.to(kind)
        ctx.save_for_backward(x_ME, weight_FE)
        y_MF: Tensor = chosen_linear(x_ME, weight_FE, None if bias_F is None else bias_F.to(kind), stream_MF)
        return y_MF

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all that asks for one."""
        x_ME, weight_FE = ctx.saved_tensors
        for_x, for_weight, for_bias, for_stream = ctx.needs_input_grad
        slope_x = times(dy_MF, weight_FE, dy_MF.dtype) if for_x else None
        slope_weight = times(dy_MF.t(), x_ME, ctx.kind) if for_weight else None
        return slope_x, slope_weight, dy_MF.sum(0, dtype=ctx.kind) if for_bias else None, dy_MF if for_stream else None


@torch.library.custom_op("textmill::linear", mutates_args=())
def chosen_linear(x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
    """`product` with a matrix that lies turned, as torch's compiler takes it."""
    return product(x_ME, weight_FE.t(), bias_F, stream_MF)


@torch.library.custom_op("textmill::times", mutates_args=())
def times(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """a b in a precision of its own, as torch's compiler takes it."""
    out = a.new_empty(a.shape[0], b.shape[1], dtype=kind)
    multiply(a, b, out)
    return out


@chosen_linear.register_fake
def _(x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
    return x_ME.new_empty(x_ME.shape[0], weight_FE.shape[0])


@times.register_fake
def _(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=kind)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, onto: Tensor | None = None) -> Tensor:
    """a b, with a row added to each of its own, and another matrix to all."""
    out = a.new_empty(a.shape[0], b.shape[1])
    multiply(a, b, out, bias=bias, onto=onto)
    return out


def multiply(a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, onto: Tensor | None = None) -> None:
    """out = a b, with a row added to each of its own, and another matrix to all, which may be out itself; summed in out's precision."""
    form = _form_of(a, b, out, bias, onto)
    choice = (
        None if form is None or torch.are_deterministic_algorithms_enabled() else _choice(form, a, b, out, bias, onto)
    )
    if choice is None:
        _by_torch(a, b, out, bias, onto)
    else:
        choice[0].make(
            choice[1], a, b, bias, onto, out, _workspace(out.device, torch.cuda.current_stream(out.device).cuda_stream)
        )


def _by_torch(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, onto: Tensor | None) -> None:
    wide: Any = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if wide and not out.is_cuda:
        a, b, wide = a.to(out.dtype), b.to(out.dtype), {}
    if onto is None and bias is not None:
        torch.addmm(bias, a, b, **wide, out=out)
        return
    torch.mm(a, b, **wide, out=out) if onto is None else torch.addmm(onto, a, b, **wide, out=out)
    if bias is not None:
        out += bias


def _form_of(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, onto: Tensor | None) -> Form | None:
    """The product's form, where there is anything to choose."""
    if not out.is_cuda or a.dtype == torch.float32 or a.dtype not in KINDS:
        return None
    (m, k), n = a.shape, b.shape[1]
    if 2 * m * n * k < SMALL or library() is None:
        return None
    matrices = [a, b, out, out if onto is None else onto]
    lies = [_turned(matrix) for matrix in matrices]
    if (
        None in lies
        or any(lies[2:])
        or matrices[3].dtype != out.dtype
        or any(matrix.data_ptr() % ALIGNED for matrix in matrices)
    ):
        return None
    return Form(m, n, k, bool(lies[0]), bool(lies[1]), a.dtype, out.dtype, bias is not None, onto is not None)


def _turned(matrix: Tensor) -> bool | None:
    """Whether a matrix lies without gaps column by column, or row by row; None: neither."""
    rows, columns = matrix.shape
    return {(columns, 1): False, (1, rows): True}.get((matrix.stride(0), matrix.stride(1)))


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Memory for products of one stream; those of another may run at the same time."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def _choice(form: Form, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, onto: Tensor | None) -> Choice:
    """How products of a form are made: the fastest way there is, tried once with the matrices of the first, or known from another run."""
    key = form, out.device
    if key in _choices:
        return _choices[key]
    if torch.cuda.is_current_stream_capturing():
        return None  # nothing can be tried now
    made = Product(form, out.device)
    known = _known(made)
    if known is not None:
        _choices[key] = known[0]
        return known[0]
    space = _workspace(out.device, torch.cuda.current_stream(out.device).cuda_stream)
    result = out.clone() if onto is out else out  # which counts, where it is added to
    before = result if onto is out else onto
    own: Trial = None, lambda: _by_torch(a, b, result, bias, before)

    def tried(ways: list[Way]) -> list[Trial]:
        return [((made, way), partial(made.make, way, a, b, bias, before, result, space)) for way in ways]

    if out.device not in _warm:
        _seconds(own[1], HEAT)
        _warm.add(out.device)
    chosen = _choices[key] = _fastest(own, tried(made.ways()), lambda way: tried(made.kin(way)))
    keep(card(out.device), str(form), b"" if chosen is None else bytes(chosen[1].kernel))
    return chosen


def _known(made: Product) -> tuple[Choice] | None:
    """What another run has chosen for such a product on such a card, if there was one."""
    kernel = kept(card(made.device), str(made.form))
    if not kernel:
        return None if kernel is None else (None,)
    way = made.way_of(kernel)
    return None if way is None else ((made, way),)


def _fastest(own: Trial, others: list[Trial], kin: Callable[[Way], list[Trial]]) -> Choice:
    """The fastest way in two turns, of those that were fast in a first trial, and of their kin; torch's own, unless that is worth it."""
    few = _fast(others)
    few = _fast([*few, *(one for choice, _ in few if choice for one in kin(choice[1]))])
    turns = [[_seconds(work, TURN) for _, work in (own, *few)] for _ in range(2)]
    limit, *taken = (min(both) for both in zip(*turns, strict=True))
    best, way = min(zip(taken, (way for way, _ in few), strict=True), key=lambda one: one[0], default=(limit, None))
    return way if best <= WORTH * limit else None


def _fast(some: list[Trial]) -> list[Trial]:
    return sorted(some, key=lambda one: _seconds(one[1], TRY))[:FEW]


def _seconds(work: Callable[[], None], spend: float) -> float:
    """Seconds that the GPU needs for a piece of work, done again and again for as long as may be spent; infinite, if it cannot be done."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    taken = 0.0
    for often in (1, 2, None):  # the first may wait until a kernel is loaded, the second says how often
        if often is None and 2 * taken > spend:
            break
        times = often or int(spend / max(taken, 1e-6))
        begun.record()
        try:
            for _ in range(times):
                work()
        except RuntimeError:
            return float("inf")
        ended.record()
        ended.synchronize()
        taken = begun.elapsed_time(ended) / 1e3 / times
    return taken
