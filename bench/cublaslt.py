"""cuBLAS' light interface, which torch has no door to: one product in any of the ways that the library proposes for it.

Called through ctypes from the library that torch has loaded already. It counts by columns; a matrix that torch holds row by row is its
transpose there, and so out = a b is asked for as out' = b' a'.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""The library's numbers for what matrices hold."""
IN_FP32 = 68
"""Its number for sums in single precision."""
PROPOSALS, WORKSPACE = 16, 32 << 20
TRANSPOSED_A, TRANSPOSED_B = 3, 4
TILE, CLUSTER = 1, 8
"""Its numbers for what is said of a product, and of a way."""


class Way(ctypes.Structure):
    """One proposal: which kernel, with which tiles, and what it needs."""

    _fields_ = (
        ("kernel", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )  # fmt: skip

    def told(self) -> str:
        """Its tile and cluster, by the numbers that cublasLt.h has for them."""
        found = []
        for what, size in ((TILE, 4), (CLUSTER, 2)):
            value, written = ctypes.c_uint32(), ctypes.c_size_t()
            given = ctypes.byref(self.kernel), what, ctypes.byref(value), ctypes.c_size_t(size), ctypes.byref(written)
            _check(library().cublasLtMatmulAlgoConfigGetAttribute(*given))
            found.append(value.value)
        return f"tile {found[0]}, cluster {found[1]}"


@cache
def library() -> Any:
    """The library that torch works with."""
    found = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    found.cublasLtMatmul.argtypes = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]
    return found


@cache
def _handle() -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS does not make this product (status {status})")


def _turned(matrix: Tensor) -> bool:
    """Whether a matrix without gaps lies column by column."""
    return matrix.stride(1) != 1


class Product:
    """out = a b for matrices that lie so in memory, and the ways in which it can be made."""

    def __init__(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        (m, k), n = a.shape, b.shape[1]
        self.a, self.b, self.out, self._said = a, b, out, ctypes.c_void_p()
        self.space = torch.empty(WORKSPACE, dtype=torch.uint8, device=out.device)
        _check(library().cublasLtMatmulDescCreate(ctypes.byref(self._said), IN_FP32, KINDS[torch.float32]))
        for what, turned in ((TRANSPOSED_A, _turned(b)), (TRANSPOSED_B, _turned(a))):
            value = ctypes.c_int32(turned)
            _check(library().cublasLtMatmulDescSetAttribute(self._said, what, ctypes.byref(value), ctypes.c_size_t(4)))
        self._b = self._layout(b.dtype, *((k, n) if _turned(b) else (n, k)))
        self._a = self._layout(a.dtype, *((m, k) if _turned(a) else (k, m)))
        self._out = self._layout(out.dtype, n, m)
        self._one, self._none = ctypes.c_float(1.0), ctypes.c_float(0.0)

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
        _check(library().cublasLtMatmulPreferenceSetAttribute(wish, 1, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size))))
        given = self._said, self._b, self._a, self._out, self._out, wish, PROPOSALS, ways, ctypes.byref(found)
        _check(library().cublasLtMatmulAlgoGetHeuristic(_handle(), *given))
        return [way for way in ways[: found.value] if way.state == 0]

    def make(self, way: Way) -> None:
        """Make it in this way, in the stream that is current."""
        here, stream = self.out.data_ptr(), torch.cuda.current_stream().cuda_stream
        matrices = self.b.data_ptr(), self._b, self.a.data_ptr(), self._a, ctypes.addressof(self._none), here, self._out, here, self._out
        last = ctypes.addressof(way.kernel), self.space.data_ptr(), self.space.numel(), stream
        _check(library().cublasLtMatmul(_handle(), self._said, ctypes.addressof(self._one), *matrices, *last))
