"""cuBLAS' light interface, which torch has no door to: one product in any of the ways that the library proposes for it.

Called through ctypes from the library that torch has loaded already. It counts by columns; a matrix that torch holds row by row is its
transpose there, and so out = a b is asked for as out' = b' a'.
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
"""The library's numbers for what matrices hold."""
IN_FP32 = 68
"""Its number for sums in single precision."""
PROPOSALS = 16
WORKSPACE = 32 << 20
"""Bytes that a product may work in."""
TRANSPOSED_A, TRANSPOSED_B, AFTER, BIAS, BIAS_KIND = 3, 4, 7, 8, 26
"""Its numbers for what is said of a product."""
SWIZZLE, OPTION, MOST_OPTIONS = 4, 5, 7
"""Its numbers for the order of a kernel's tiles, for a choice of the kernel's own, and for how many of these there are."""


class Way(ctypes.Structure):
    """One proposal: which kernel, with which tiles, and what it needs."""

    _fields_ = (
        ("kernel", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What two products have in common that may be made in the same way: out [M, N] = a [M, K] b [K, N]."""

    m: int
    n: int
    k: int
    a_turned: bool
    """Whether a lies in memory column by column."""
    b_turned: bool
    kind: torch.dtype
    out: torch.dtype
    bias: bool
    """Whether a row is added to each of out's."""
    adds: bool
    """Whether the product is added to another matrix, which may be out."""


@cache
def library() -> Any:
    """The library that torch works with, or None where there is none."""
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
    """What a choice of ways holds for: the card's name and the library's version."""
    return f"{torch.cuda.get_device_name(device)}, cuBLAS {library().cublasLtGetVersion()}"


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS does not make this product (status {status})")


class Product:
    """A product of one form on one device, and the ways in which it can be made."""

    def __init__(self, form: Form, device: torch.device) -> None:
        self.form, self.device, self._said = form, device, ctypes.c_void_p()
        _check(library().cublasLtMatmulDescCreate(ctypes.byref(self._said), IN_FP32, KINDS[torch.float32]))
        self._say(TRANSPOSED_A, ctypes.c_int32(form.b_turned))
        self._say(TRANSPOSED_B, ctypes.c_int32(form.a_turned))
        self._say(AFTER, ctypes.c_uint32(4 if form.bias else 1))
        if form.bias:
            self._say(BIAS_KIND, ctypes.c_int32(KINDS[form.kind]))
        self._b = self._layout(form.kind, *((form.k, form.n) if form.b_turned else (form.n, form.k)))
        self._a = self._layout(form.kind, *((form.m, form.k) if form.a_turned else (form.k, form.m)))
        self._out = self._layout(form.out, form.n, form.m)
        self._one, self._before = ctypes.c_float(1.0), ctypes.c_float(float(form.adds))

    def _say(self, what: int, value: Any) -> None:
        _check(
            library().cublasLtMatmulDescSetAttribute(
                self._said, what, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )

    def _layout(self, kind: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), KINDS[kind], *sizes))
        return layout

    def ways(self) -> list[Way]:
        """What the library proposes, the likeliest first."""
        wish, found, ways = ctypes.c_void_p(), ctypes.c_int(), (Way * PROPOSALS)()
        _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(wish)))
        size = ctypes.c_size_t(WORKSPACE)
        _check(
            library().cublasLtMatmulPreferenceSetAttribute(
                wish, 1, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size))
            )
        )
        given = self._said, self._b, self._a, self._out, self._out, wish, PROPOSALS, ways, ctypes.byref(found)
        status = library().cublasLtMatmulAlgoGetHeuristic(_handle(self.device), *given)
        library().cublasLtMatmulPreferenceDestroy(wish)
        return [] if status else [way for way in ways[: found.value] if way.state == 0]

    def kin(self, way: Way) -> list[Way]:
        """The same kernel, its tiles in another order or with an option of its own: the library may not propose the best of them."""
        most, size, found = ctypes.c_int32(), ctypes.c_size_t(), {}
        given = ctypes.byref(most), ctypes.c_size_t(ctypes.sizeof(most)), ctypes.byref(size)
        library().cublasLtMatmulAlgoCapGetAttribute(ctypes.byref(way), MOST_OPTIONS, *given)
        for swizzle, option in itertools.product(range(2), range(most.value + 1)):
            other = Way.from_buffer_copy(way)
            for what, value in ((SWIZZLE, ctypes.c_uint32(swizzle)), (OPTION, ctypes.c_uint32(option))):
                said = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                library().cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(other), what, *said)
            found[bytes(other.kernel)] = self.way_of(bytes(other.kernel))
        return [other for kernel, other in found.items() if other is not None and kernel != bytes(way.kernel)]

    def way_of(self, kernel: bytes) -> Way | None:
        """A way that was proposed before, perhaps in another process; None, if the library does not make this product in it."""
        way, checked = Way(), Way()
        if len(kernel) != ctypes.sizeof(way.kernel):
            return None
        ctypes.memmove(way.kernel, kernel, len(kernel))
        given = self._said, self._b, self._a, self._out, self._out, ctypes.byref(way), ctypes.byref(checked)
        status = library().cublasLtMatmulAlgoCheck(_handle(self.device), *given)
        return None if status or checked.state or checked.workspace > WORKSPACE else way

    def make(
        self, way: Way, a: Tensor, b: Tensor, bias: Tensor | None, onto: Tensor | None, out: Tensor, workspace: Tensor
    ) -> None:
        """Make it in this way, in the stream that is current."""
        if bias is not None:
            self._say(BIAS, ctypes.c_void_p(bias.data_ptr()))
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
            library().cublasLtMatmul(_handle(self.device), self._said, ctypes.addressof(self._one), *matrices, *last)
        )
