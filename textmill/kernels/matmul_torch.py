"""Matmuls for training; on a GPU each uses the fastest algorithm that cuBLASLt proposes, found by measuring them.

cuBLASLt's first proposal is the fastest on a cool GPU. A GPU that trains runs at its power limit, where other tile
sizes need less power for the same work: on an H200 they make most matmuls of a GPT-2 5 to 20% faster. So the GPU is
warmed up first. Every proposal gets a short trial; the fastest few, and variants of them with another tile order, get
longer ones. The choice is cached on disk for later runs. Algorithms differ in rounding, so results may differ
between GPU models, and between processes that measure at the same time. `engine.deterministic` uses torch's matmuls.

The loss always uses tuned matmuls for the output head; a net uses them for its own layers if it is compiled.
Shapes in names: M rows, E inputs, F outputs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from textmill.errors import TextmillError
from textmill.kernels.cublaslt import DTYPE_CODES, WORKSPACE_BYTES, Algorithm, Matmul, MatmulSpec, gpu_key, library
from textmill.storage.files import file_lock, read_json, write_json

MIN_FLOPS = 1e10
"""Smaller matmuls are left to torch: tuning them gains nothing."""
WARM_UP_SECONDS = 1.0
SHORT_TRIAL_SECONDS = 0.006
LONG_TRIAL_SECONDS = 0.04
"""Work before the first trial, so that the GPU reaches its training temperature; and how long each trial runs."""
FINALISTS = 4
"""How many of the fastest algorithms get variants and long trials, compared with torch's own."""
MAX_TIME_RATIO = 0.99
"""An algorithm is chosen only if it needs at most this fraction of torch's time."""
ALIGNMENT = 256
"""Alignment in bytes that cuBLASLt assumes of every matrix."""

Choice = tuple[Matmul, Algorithm] | None
"""How a matmul is computed; None: by torch."""
Trial = tuple[Choice, Callable[[], None]]
"""A choice, and a function that runs the matmul with it."""
_choices: dict[tuple[MatmulSpec, torch.device], Choice] = {}
_warm_devices: set[torch.device] = set()


def use_tuned_matmul(x_NTE: Tensor, weight_FE: Tensor) -> bool:
    """True if a linear layer uses tuned matmuls: compiled for training on a GPU, and large enough."""
    trains = x_NTE.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()
    return trains and 2 * x_NTE.numel() * len(weight_FE) >= MIN_FLOPS


def linear(x_NTE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
    """torch's F.linear, with tuned matmuls where they apply; autocast works as in torch."""
    if use_tuned_matmul(x_NTE, weight_FE):
        return _linear(x_NTE, weight_FE, bias_F, None)
    return F.linear(x_NTE, weight_FE, bias_F)


def add_linear(stream_NTF: Tensor, layer: nn.Linear, x_NTE: Tensor) -> Tensor:
    """stream + layer(x). The bias gets no gradient here: norm_and_residual computes it from the stream's gradient."""
    return _linear(x_NTE, layer.weight, layer.bias.detach(), stream_NTF)


def _linear(x_NTE: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_NTF: Tensor | None) -> Tensor:
    device = x_NTE.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_NTE.dtype
    stream_MF = None if stream_NTF is None else stream_NTF.to(dtype).flatten(0, -2)
    x_ME = x_NTE.to(dtype).flatten(0, -2)
    y_MF: Tensor = Linear.apply(x_ME, weight_FE, bias_F, stream_MF)  # type: ignore[no-untyped-call]
    return y_MF.view(*x_NTE.shape[:-1], -1)


class Linear(torch.autograd.Function):
    """x W' + bias + stream in the precision of x; the matmul for the weight gradient writes the weight's precision."""

    @staticmethod
    def forward(ctx: Any, x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
        """x W' + bias + stream."""
        dtype = x_ME.dtype
        ctx.weight_dtype = weight_FE.dtype
        weight_FE = weight_FE.to(dtype)
        ctx.save_for_backward(x_ME, weight_FE)
        y_MF: Tensor = tuned_linear(x_ME, weight_FE, None if bias_F is None else bias_F.to(dtype), stream_MF)
        return y_MF

    @staticmethod
    def backward(ctx: Any, dy_MF: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of those inputs that need one."""
        x_ME, weight_FE = ctx.saved_tensors
        for_x, for_weight, for_bias, for_stream = ctx.needs_input_grad
        dx_ME = matmul_to_dtype(dy_MF, weight_FE, dy_MF.dtype) if for_x else None
        dweight_FE = matmul_to_dtype(dy_MF.t(), x_ME, ctx.weight_dtype) if for_weight else None
        dbias_F = dy_MF.sum(0, dtype=ctx.weight_dtype) if for_bias else None
        return dx_ME, dweight_FE, dbias_F, dy_MF if for_stream else None


@torch.library.custom_op("textmill::linear", mutates_args=())
def tuned_linear(x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
    """x W' + bias + stream, as an operator that torch.compile does not trace."""
    return matmul(x_ME, weight_FE.t(), bias_F, stream_MF)


@torch.library.custom_op("textmill::times", mutates_args=())
def matmul_to_dtype(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    """a b in the given dtype, as an operator that torch.compile does not trace."""
    out = a.new_empty(a.shape[0], b.shape[1], dtype=kind)
    matmul_into(a, b, out)
    return out


@tuned_linear.register_fake
def _(x_ME: Tensor, weight_FE: Tensor, bias_F: Tensor | None, stream_MF: Tensor | None) -> Tensor:
    return x_ME.new_empty(x_ME.shape[0], weight_FE.shape[0])


@matmul_to_dtype.register_fake
def _(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=kind)


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """a b + bias + addend, in the dtype of a."""
    out = a.new_empty(a.shape[0], b.shape[1])
    matmul_into(a, b, out, bias=bias, addend=addend)
    return out


def matmul_into(a: Tensor, b: Tensor, out: Tensor, *, bias: Tensor | None = None, addend: Tensor | None = None) -> None:
    """out = a b + bias + addend, summed in out's precision; the addend may be out itself."""
    spec = None if torch.are_deterministic_algorithms_enabled() else _spec_of(a, b, out, bias, addend)
    choice = None if spec is None else _choose(spec, a, b, out, bias, addend)
    if choice is None:
        _torch_matmul(a, b, out, bias, addend)
        return
    own, algorithm = choice
    stream = torch.cuda.current_stream(out.device).cuda_stream
    own.run(algorithm, a, b, bias, addend, out, _workspace(out.device, stream))


def _torch_matmul(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, addend: Tensor | None) -> None:
    options: Any = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    if options and not out.is_cuda:
        a = a.to(out.dtype)
        b = b.to(out.dtype)
        options = {}
    if addend is None and bias is not None:
        torch.addmm(bias, a, b, **options, out=out)
        return
    torch.mm(a, b, **options, out=out) if addend is None else torch.addmm(addend, a, b, **options, out=out)
    if bias is not None:
        out += bias


def _spec_of(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, addend: Tensor | None) -> MatmulSpec | None:
    """What identifies this matmul; None if cuBLASLt cannot compute it or tuning it gains nothing."""
    if not out.is_cuda or a.dtype == torch.float32 or a.dtype not in DTYPE_CODES:
        return None
    (m, k), n = a.shape, b.shape[1]
    if 2 * m * n * k < MIN_FLOPS or library() is None:
        return None
    matrices = [a, b, out, out if addend is None else addend]
    transposed = [_is_transposed(matrix) for matrix in matrices]
    if (
        None in transposed
        or any(transposed[2:])
        or matrices[3].dtype != out.dtype
        or any(matrix.data_ptr() % ALIGNMENT for matrix in matrices)
    ):
        return None
    a_transposed = bool(transposed[0])
    b_transposed = bool(transposed[1])
    return MatmulSpec(m, n, k, a_transposed, b_transposed, a.dtype, out.dtype, bias is not None, addend is not None)


def _is_transposed(matrix: Tensor) -> bool | None:
    """True if a contiguous matrix is column-major, False if it is row-major; None if it is not contiguous."""
    rows, columns = matrix.shape
    return {(columns, 1): False, (1, rows): True}.get((matrix.stride(0), matrix.stride(1)))


@cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """Scratch memory for the matmuls of one CUDA stream; other streams may run at the same time."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _choose(spec: MatmulSpec, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, addend: Tensor | None) -> Choice:
    """The fastest algorithm: known already, cached by another run, or measured now with these matrices."""
    key = spec, out.device
    if key in _choices:
        return _choices[key]
    if torch.cuda.is_current_stream_capturing():
        return None  # nothing can be measured while a CUDA graph is captured
    own = Matmul(spec, out.device)
    cached = _cached_choice(own)
    if cached is not None:
        _choices[key] = cached[0]
        return cached[0]
    workspace = _workspace(out.device, torch.cuda.current_stream(out.device).cuda_stream)
    result = out.clone() if addend is out else out  # trials must not change a sum that is still needed
    before = result if addend is out else addend
    by_torch: Trial = None, lambda: _torch_matmul(a, b, result, bias, before)

    def trials(algorithms: list[Algorithm]) -> list[Trial]:
        return [((own, one), partial(own.run, one, a, b, bias, before, result, workspace)) for one in algorithms]

    if out.device not in _warm_devices:
        _seconds(by_torch[1], WARM_UP_SECONDS)
        _warm_devices.add(out.device)
    chosen = _fastest(
        by_torch, trials(own.propose_algorithms()), lambda algorithm: trials(own.list_variants(algorithm))
    )
    _choices[key] = chosen
    store_algorithm(gpu_key(out.device), str(spec), b"" if chosen is None else bytes(chosen[1].algo))
    return chosen


def _cached_choice(own: Matmul) -> tuple[Choice] | None:
    """What an earlier run chose for this matmul on such a GPU; None: not measured yet."""
    algo = load_algorithm(gpu_key(own.device), str(own.spec))
    if not algo:
        return None if algo is None else (None,)
    algorithm = own.restore_algorithm(algo)
    return None if algorithm is None else ((own, algorithm),)


def _fastest(by_torch: Trial, proposed: list[Trial], variants: Callable[[Algorithm], list[Trial]]) -> Choice:
    """The fastest finalist in the better of two long trials; torch's own unless it is beaten clearly."""
    finalists = _fastest_few(proposed)
    more = [trial for choice, _ in finalists if choice for trial in variants(choice[1])]
    finalists = _fastest_few([*finalists, *more])
    rounds = [[_seconds(work, LONG_TRIAL_SECONDS) for _, work in (by_torch, *finalists)] for _ in range(2)]
    torch_seconds, *seconds = (min(both) for both in zip(*rounds, strict=True))
    choices = [choice for choice, _ in finalists]
    best, choice = min(zip(seconds, choices, strict=True), key=lambda one: one[0], default=(torch_seconds, None))
    return choice if best <= MAX_TIME_RATIO * torch_seconds else None


def _fastest_few(trials: list[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: _seconds(trial[1], SHORT_TRIAL_SECONDS))[:FINALISTS]


def _seconds(work: Callable[[], None], budget: float) -> float:
    """GPU seconds of one call of `work`, averaged over about `budget` seconds of calls; infinite if it fails."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    each = 0.0
    for fixed in (1, 2, None):  # the first call may load a kernel; the second measurement gives the number of repeats
        if fixed is None and 2 * each > budget:
            break
        repeats = fixed or int(budget / max(each, 1e-6))
        start.record()
        try:
            for _ in range(repeats):
                work()
        except RuntimeError:
            return float("inf")
        end.record()
        end.synchronize()
        each = start.elapsed_time(end) / 1e3 / repeats
    return each


CACHE_FILE = "matmuls-3.json"
"""The number changes when algorithms are searched, measured or named differently."""


def cache_path() -> Path:
    """The cache file, under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "textmill" / CACHE_FILE


def load_algorithm(gpu: str, matmul: str) -> bytes | None:
    """The algorithm chosen for a matmul on this GPU; empty: torch's own was fastest; None: not measured yet."""
    chosen = _read_cache().get(gpu, {})
    try:
        return bytes.fromhex(chosen[matmul])
    except (KeyError, TypeError, ValueError):
        return None


def store_algorithm(gpu: str, matmul: str, algorithm: bytes) -> None:
    """Add a choice to the file, under a lock; do nothing if the file cannot be written or locked."""
    with suppress(OSError, RuntimeError, TextmillError):  # RuntimeError: no home directory
        cache_path().parent.mkdir(parents=True, exist_ok=True)
        with file_lock(cache_path().with_suffix(".lock"), None):
            cached_choices = _read_cache()
            chosen = cached_choices.get(gpu)
            cached_choices[gpu] = {**(chosen if isinstance(chosen, dict) else {}), matmul: algorithm.hex()}
            write_json(cache_path(), cached_choices)


def _read_cache() -> dict[str, Any]:
    """The file's content; empty if it is missing or damaged."""
    try:
        cached_choices = read_json(cache_path())
    except (RuntimeError, TextmillError):
        return {}
    return cached_choices if isinstance(cached_choices, dict) else {}
