"""cuBLASLt through ctypes: one matmul with any of the algorithms that the library proposes.

torch has no interface for choosing the algorithm. The library is the one that torch has already loaded. It expects
column-major matrices and reads a row-major matrix as its transpose. So out = a b is computed as out' = b' a', and b is
the library's first operand (its "A").
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""cuBLAS codes of data types."""
COMPUTE_FP32 = 68
"""cuBLAS code of fp32 accumulation."""
MAX_PROPOSALS = 16
"""Most algorithms that the library may propose for one matmul."""
WORKSPACE_BYTES = 32 << 20
"""Bytes of scratch memory that an algorithm may use."""
TRANSPOSE_A = 3
TRANSPOSE_B = 4
EPILOGUE = 7
BIAS = 8
BIAS_DTYPE = 26
"""cuBLASLt codes of matmul attributes."""
EPILOGUE_DEFAULT = 1
EPILOGUE_BIAS = 4
"""cuBLASLt codes of what is done with the result: nothing, or adding the bias."""
MAX_WORKSPACE = 1
"""cuBLASLt code of the preference that limits the workspace."""
SWIZZLE = 4
CUSTOM_OPTION = 5
CUSTOM_OPTION_MAX = 7
"""cuBLASLt codes: the order of a kernel's tiles, a kernel-specific option, and how many such options exist."""


class Algorithm(ctypes.Structure):
    """One algorithm and the workspace it needs (cublasLtMatmulHeuristicResult_t).

    `algo` (cublasLtMatmulAlgo_t) selects the kernel, its tiles and options; the cache on disk stores its bytes.
    """

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves_count", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class MatmulSpec:
    """The properties of a matmul that decide which algorithm is fastest: out [M, N] = a [M, K] b [K, N].

    Its text is the key of the cache on disk: renaming a field discards what earlier runs measured.
    """

    m: int
    n: int
    k: int
    a_transposed: bool
    """True if a is column-major."""
    b_transposed: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: bool
    """True if a bias row is added."""
    has_addend: bool
    """True if a matrix is added to the product: `addend`, which may be `out` itself."""


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
def gpu_key(device: torch.device) -> str:
    """The cache key of measured algorithms, which are valid only for one GPU model and one version of the library."""
    return f"{torch.cuda.get_device_name(device)}, cuBLAS {library().cublasLtGetVersion()}"


@cache
def _handle(device: torch.device) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(library().cublasLtCreate(ctypes.byref(handle)))
    return handle


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"a cuBLASLt call failed with status {status}")


class Matmul:
    """One matmul on one device: its cuBLASLt descriptors, its algorithms, and how to run it."""

    def __init__(self, spec: MatmulSpec, device: torch.device) -> None:
        self.spec, self.device, self._descriptor = spec, device, ctypes.c_void_p()
        _check(
            library().cublasLtMatmulDescCreate(ctypes.byref(self._descriptor), COMPUTE_FP32, DTYPE_CODES[torch.float32])
        )
        self._set_attribute(TRANSPOSE_A, ctypes.c_int32(spec.b_transposed))
        self._set_attribute(TRANSPOSE_B, ctypes.c_int32(spec.a_transposed))
        self._set_attribute(EPILOGUE, ctypes.c_uint32(EPILOGUE_BIAS if spec.bias else EPILOGUE_DEFAULT))
        if spec.bias:
            self._set_attribute(BIAS_DTYPE, ctypes.c_int32(DTYPE_CODES[spec.dtype]))
        self._b = self._create_layout(spec.dtype, *((spec.k, spec.n) if spec.b_transposed else (spec.n, spec.k)))
        self._a = self._create_layout(spec.dtype, *((spec.m, spec.k) if spec.a_transposed else (spec.k, spec.m)))
        self._out = self._create_layout(spec.out_dtype, spec.n, spec.m)
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(float(spec.has_addend))

    def _set_attribute(self, attribute: int, value: Any) -> None:
        _check(
            library().cublasLtMatmulDescSetAttribute(
                self._descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
            )
        )

    def _create_layout(self, dtype: torch.dtype, rows: int, columns: int) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), DTYPE_CODES[dtype], *sizes))
        return layout

    def propose_algorithms(self) -> list[Algorithm]:
        """Return the algorithms that the library proposes, the one it expects to be fastest first."""
        preference = ctypes.c_void_p()
        found = ctypes.c_int()
        algorithms = (Algorithm * MAX_PROPOSALS)()
        _check(library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        size = ctypes.c_size_t(WORKSPACE_BYTES)
        _check(
            library().cublasLtMatmulPreferenceSetAttribute(
                preference, MAX_WORKSPACE, ctypes.byref(size), ctypes.c_size_t(ctypes.sizeof(size))
            )
        )
        arguments = (
            self._descriptor,
            self._b,
            self._a,
            self._out,
            self._out,
            preference,
            MAX_PROPOSALS,
            algorithms,
            ctypes.byref(found),
        )
        status = library().cublasLtMatmulAlgoGetHeuristic(_handle(self.device), *arguments)
        library().cublasLtMatmulPreferenceDestroy(preference)
        return [] if status else [algorithm for algorithm in algorithms[: found.value] if algorithm.status == 0]

    def list_variants(self, algorithm: Algorithm) -> list[Algorithm]:
        """Return the kernel with other tile orders and options: the library does not always propose the fastest."""
        option_count = ctypes.c_int32()
        size = ctypes.c_size_t()
        found = {}
        arguments = ctypes.byref(option_count), ctypes.c_size_t(ctypes.sizeof(option_count)), ctypes.byref(size)
        library().cublasLtMatmulAlgoCapGetAttribute(ctypes.byref(algorithm), CUSTOM_OPTION_MAX, *arguments)
        for swizzle, option in itertools.product(range(2), range(option_count.value + 1)):
            other = Algorithm.from_buffer_copy(algorithm)
            for attribute, value in ((SWIZZLE, ctypes.c_uint32(swizzle)), (CUSTOM_OPTION, ctypes.c_uint32(option))):
                setting = ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
                library().cublasLtMatmulAlgoConfigSetAttribute(ctypes.byref(other), attribute, *setting)
            found[bytes(other.algo)] = self.restore_algorithm(bytes(other.algo))
        return [other for algo, other in found.items() if other is not None and algo != bytes(algorithm.algo)]

    def restore_algorithm(self, algo: bytes) -> Algorithm | None:
        """Return an algorithm saved earlier, perhaps by another process; None if the library rejects it here."""
        algorithm = Algorithm()
        checked = Algorithm()
        if len(algo) != ctypes.sizeof(algorithm.algo):
            return None
        ctypes.memmove(algorithm.algo, algo, len(algo))
        arguments = (
            self._descriptor,
            self._b,
            self._a,
            self._out,
            self._out,
            ctypes.byref(algorithm),
            ctypes.byref(checked),
        )
        status = library().cublasLtMatmulAlgoCheck(_handle(self.device), *arguments)
        return None if status or checked.status or checked.workspace > WORKSPACE_BYTES else algorithm

    def run(
        self,
        algorithm: Algorithm,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        addend: Tensor | None,
        out: Tensor,
        workspace: Tensor,
    ) -> None:
        """Run this algorithm in the current CUDA stream."""
        if bias is not None:
            self._set_attribute(BIAS, ctypes.c_void_p(bias.data_ptr()))
        out_pointer = out.data_ptr()
        addend_pointer = (out if addend is None else addend).data_ptr()
        matrices = (
            b.data_ptr(),
            self._b,
            a.data_ptr(),
            self._a,
            ctypes.addressof(self._beta),
            addend_pointer,
            self._out,
            out_pointer,
            self._out,
        )
        algorithm_arguments = (
            ctypes.addressof(algorithm.algo),
            workspace.data_ptr(),
            workspace.numel(),
            torch.cuda.current_stream(self.device).cuda_stream,
        )
        _check(
            library().cublasLtMatmul(
                _handle(self.device), self._descriptor, ctypes.addressof(self._alpha), *matrices, *algorithm_arguments
            )
        )
