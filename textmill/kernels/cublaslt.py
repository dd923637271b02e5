"""cuBLASLt through ctypes: one matmul with any of the algorithms that the library proposes.

torch has no interface for choosing the algorithm. The library is the one that torch has already loaded. It is
column-major: a row-major matrix is its transpose there, so out = a b is requested as out' = b' a'.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cuBLAS codes of data types."""
IN_FP32 = 68
"""cuBLAS code of fp32 accumulation."""
PROPOSALS = 16
WORKSPACE = 32 << 20
"""Bytes of scratch memory that an algorithm may use."""
TRANSPOSED_A, TRANSPOSED_B, AFTER, BIAS, BIAS_KIND = 3, 4, 7, 8, 26
"""cuBLASLt codes of matmul attributes."""
SWIZZLE, OPTION, MOST_OPTIONS = 4, 5, 7
"""cuBLASLt codes: the order of a kernel's tiles, a kernel-specific option, and how many such options exist."""


class Way(ctypes.Structure):
    """One proposed algorithm: its kernel and tiles, and the workspace it needs (cublasLtMatmulHeuristicResult_t)."""

    _fields_ = (
        ("kernel", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What identifies a matmul for choosing its algorithm: out [M, N] = a [M, K] b [K, N]."""

    m: int
    n: int
    k: int
    a_turned: bool
    """True if a is column-major."""
    b_turned: bool
    kind: torch.dtype
    out: torch.dtype
    bias: bool
    """True if a bias row is added."""
    adds: bool
    """True if the result is added to another matrix, which may be out."""


@cache
def library() -> Any:
    """The cuBLASLt library that torch uses; None if there is none."""
    if torch.version.cuda is None:
        return None
    try:
        found = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.partition('.')[0]}")
    except OSError:
        return None
    found.cublasLtGetVersion.restype = ctypes.c_size_t
    found.cublasLtMatmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return found


@cache
def card(device: torch.device) -> str:
    """What a choice of algorithms is valid for: the GPU's name and the library's version."""
    return f"{torch.cuda.get_device_name(device)}, cuBLAS {library().cublasLtGetVersion()}"


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS refuses this matmul (status {status})")


class Product:
    """A matmul of one form on one device, and its algorithms."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form, self.device, self._descriptor = form, device, ctypes.c_void_p()
        _check(library().cublasLtMatmulDescCreate(ctypes.byref(self._descriptor), IN_FP32, KINDS[torch.float32]))
        self._set(TRANSPOSED_A, ctypes.c_int32(form.b_turned))
        self._set(TRANSPOSED_B, ctypes.c_int32(form.a_turned))
        self._set(AFTER, ctypes.c_uint32(4 if form.bias else 1))
        if form.bias:
            self._set(BIAS_KIND, ctypes.c_int32(KINDS[form.kind]))
        self._b = self._layout(form.kind, *((form.k, form.n) if form.b_turned else (form.n, form.k)))
        self._a = self._layout(form.kind, *((form.m, form.k) if form.a_turned else (form.k, form.m)))
        self._out = self._layout(form.out, form.n, form.m)
        self._one, self._before = ctypes.c_float(1.0), ctypes.c_float(float(form.adds))

    def _set(self, what: int, value: Any) -> None:
        _check(
            library().cublasLtMatmulDescSetAttribute(
                self._descriptor, what, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )

    def _layout(self, kind: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), KINDS[kind], *sizes))
        return layout

    def ways(self) -> list[Way]:
        """The algorithms that the library proposes, its favourite first."""
        preference, found, ways = ctypes.c_void_p(), ctypes.c_int(), (Way * PROPOSALS)()
        _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        size = ctypes.c_size_t(WORKSPACE)
        _check(
            library().cublasLtMatmulPreferenceSetAttribute(
                preference, 1, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size))
            )
        )
        given = (
            self._descriptor,
            self._b,
            self._a,
            self._out,
            self._out,
            preference,
            PROPOSALS,
            ways,
            ctypes.byref(found),
        )
        status = library().cublasLtMatmulAlgoGetHeuristic(_handle(self.device), *given)
        library().cublasLtMatmulPreferenceDestroy(preference)
        return [] if status else [way for way in ways[: found.value] if way.state == 0]

    def kin(self, way: Way) -> list[Way]:
        """The same kernel with another tile order or option: the library does not always propose the best of these."""
        option_count, size, found = ctypes.c_int32(), ctypes.c_size_t(), {}
        given = ctypes.byref(option_count), ctypes.c_size_t(ctypes.sizeof(option_count)), ctypes.byref(size)
        library().cublasLtMatmulAlgoCapGetAttribute(ctypes.byref(way), MOST_OPTIONS, *given)
        for swizzle, option in itertools.product(range(2), range(option_count.value + 1)):
            other = Way.from_buffer_copy(way)
            for what, value in ((SWIZZLE, ctypes.c_uint32(swizzle)), (OPTION, ctypes.c_uint32(option))):
                setting = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                library().cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(other), what, *setting)
            found[bytes(other.kernel)] = self.way_of(bytes(other.kernel))
        return [other for kernel, other in found.items() if other is not None and kernel != bytes(way.kernel)]

    def way_of(self, kernel: bytes) -> Way | None:
        """An algorithm saved earlier, perhaps by another process; None if the library does not accept it for this matmul."""
        way, checked = Way(), Way()
        if len(kernel) != ctypes.sizeof(way.kernel):
            return None
        ctypes.memmove(way.kernel, kernel, len(kernel))
        given = self._descriptor, self._b, self._a, self._out, self._out, ctypes.byref(way), ctypes.byref(checked)
        status = library().cublasLtMatmulAlgoCheck(_handle(self.device), *given)
        return None if status or checked.state or checked.workspace > WORKSPACE else way

    def make(
        self, way: Way, a: Tensor, b: Tensor, bias: Tensor | None, onto: Tensor | None, out: Tensor, workspace: Tensor
    ) -> None:
        """Run this algorithm in the current CUDA stream."""
        if bias is not None:
            self._set(BIAS, ctypes.c_void_p(bias.data_ptr()))
        here, before = out.data_ptr(), (out if onto is None else onto).data_ptr()
        matrices = (
            b.data_ptr(),
            self._b,
            a.data_ptr(),
            self._a,
            ctypes.addressof(self._before),
            before,
            self._out,
            here,
            self._out,
        )
        last = (
            ctypes.addressof(way.kernel),
            workspace.data_ptr(),
            workspace.numel(),
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        _check(
            library().cublasLtMatmul(
                _handle(self.device), self._descriptor, ctypes.addressof(self._one), *matrices, *last
            )
        )
