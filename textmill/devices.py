"""The torch device and precision that `engine.device` and `engine.precision` name; copies to and from a device."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from textmill.errors import TextmillError, rank_of_launcher, warn


class Gpu(NamedTuple):
    """What a data sheet says of a GPU."""

    tflops: float
    """Peak of dense bf16 matmuls with fp32 sums, in 10^12 operations per second; V100 and T4: fp16; P100 and P40: fp32;
    RTX 30 to 50: twice their fp32 rate, which is what their tensor cores give with fp32 sums."""
    memory_gb: int
    """Of its largest version."""
    memory_gb_s: float
    multiprocessors: int
    mhz: float
    """Boost clock, at which the peak is computed."""
    link_gb_s: float
    """To the other GPUs of its machine, in one direction: NVLink, else PCIe."""


GPUS = {
    "H200": Gpu(989, 140, 4800, 132, 1830, 450),
    "H100 PCIe": Gpu(756, 80, 2039, 114, 1620, 64),
    "H100": Gpu(989, 80, 3350, 132, 1830, 450),
    "GH200": Gpu(989, 96, 4000, 132, 1830, 450),
    "B200": Gpu(2250, 180, 8000, 148, 1856, 900),
    "MI300X": Gpu(1307, 192, 5300, 304, 2100, 448),
    "A100": Gpu(312, 80, 2039, 108, 1410, 300),
    "A800": Gpu(312, 80, 2039, 108, 1410, 200),
    "L40S": Gpu(362, 48, 864, 142, 2490, 32),
    "L40": Gpu(181, 48, 864, 142, 2490, 32),
    "L4": Gpu(121, 24, 300, 58, 2040, 32),
    "A40": Gpu(150, 48, 696, 84, 1740, 32),
    "A10": Gpu(125, 24, 600, 72, 1695, 32),
    "RTX 5090": Gpu(210, 32, 1792, 170, 2407, 64),
    "RTX 5080": Gpu(113, 16, 960, 84, 2617, 64),
    "RTX 5070 Ti": Gpu(88, 16, 896, 70, 2452, 64),
    "RTX 5070": Gpu(62, 12, 672, 48, 2512, 64),
    "RTX 5060 Ti": Gpu(47, 16, 448, 36, 2572, 32),
    "RTX 5060": Gpu(38, 8, 448, 30, 2497, 32),
    "RTX 4090": Gpu(165, 24, 1008, 128, 2520, 32),
    "RTX 4080": Gpu(97, 16, 717, 76, 2505, 32),
    "RTX 4070 Ti": Gpu(80, 12, 504, 60, 2610, 32),
    "RTX 4070": Gpu(58, 12, 504, 46, 2475, 32),
    "RTX 4060 Ti": Gpu(44, 16, 288, 34, 2535, 16),
    "RTX 4060": Gpu(30, 8, 272, 24, 2460, 16),
    "RTX 3090 Ti": Gpu(80, 24, 1008, 84, 1860, 32),
    "RTX 3090": Gpu(71, 24, 936, 82, 1695, 32),
    "RTX 3080 Ti": Gpu(68, 12, 912, 80, 1665, 32),
    "RTX 3080": Gpu(60, 10, 760, 68, 1710, 32),
    "RTX 3070 Ti": Gpu(43, 8, 608, 48, 1770, 32),
    "RTX 3070": Gpu(41, 8, 448, 46, 1725, 32),
    "RTX 3060 Ti": Gpu(32, 8, 448, 38, 1665, 32),
    "RTX 3060": Gpu(25, 12, 360, 28, 1777, 32),
    "V100": Gpu(125, 32, 900, 80, 1530, 150),
    "T4": Gpu(65, 16, 320, 40, 1590, 16),
    "P100": Gpu(10.6, 16, 732, 56, 1480, 80),
    "P40": Gpu(12, 24, 347, 30, 1531, 16),
}
"""By product name; a name that begins another one comes after it. Other GPUs show no MFU."""


def open_device(name: str) -> torch.device:
    """The device of `engine.device`; auto and tpu mean CUDA if available, then MPS, then the CPU."""
    name = "auto" if name == "tpu" else name
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise TextmillError(
            f"engine.device: '{name}' is not available; found {count} CUDA devices; set engine.device=cpu"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # our own kernels run on the current device
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TextmillError("engine.device: 'mps' is not available; set engine.device=cpu")
    return device


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of matmuls; auto: bf16 on a GPU that supports it, fp16 on the generation before, else fp32.

    With fp8, some matmuls of training use fp8; everything else, and later use of the model, is bf16.
    """
    if name == "auto":
        name = _best_precision(device)
    elif name == "bf16" and device.type == "cpu":
        _report_slow_bf16()
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[name]


@cache
def _report_slow_bf16() -> None:
    """Say once that this CPU has no bf16; torch's own warning shows a stack of C++ functions."""
    # The question is one of oneDNN's own operations, which a torch without oneDNN lacks, as on a Mac.
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not has_onednn or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
    if rank_of_launcher() == 0:
        warn(
            "engine.precision: this CPU has no instructions for bf16, which is slower than fp32 here; set fp32 or auto"
        )


def _best_precision(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device)[0] == 7 else "fp32"


def check_fp8(device: torch.device) -> None:
    """Raise an error if the device has no fp8 matmuls."""
    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) < (8, 9):
        what = f"found {device.type}" if device.type != "cuda" else f"this one has {found[0]}.{found[1]}"
        raise TextmillError(
            f"engine.precision: fp8 needs a GPU of compute capability 8.9 or more, {what}; set engine.precision=auto"
        )


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Matmuls in a precision while weights stay fp32; used in training and evaluation, so their losses agree."""
    return torch.autocast(device.type, precision) if precision != torch.float32 else nullcontext()


def attention_order(device: torch.device) -> AbstractContextManager[Any]:
    """The order of attention backends: cuDNN first, the fastest for training where it supports the shapes."""
    if device.type != "cuda":
        return nullcontext()
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(backends, set_priority=True)


def peak_flops_of(device: torch.device) -> float | None:
    """The device's peak FLOP/s, if known."""
    if device.type != "cuda":
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(gpu: str) -> float | None:
    """The peak FLOP/s of a GPU by its product name, if known."""
    return next((1e12 * known.tflops for name, known in GPUS.items() if name in gpu), None)


def name_of(device: torch.device) -> str:
    """The product name of a GPU, or the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def memory_of(device: torch.device) -> int:
    """Bytes of the device's memory; of a CPU, the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def measure_matmul(device: torch.device) -> float:
    """FLOP/s of a large matmul in the precision that training uses, the best of a few measurements."""
    size = 8192
    dtype = torch_dtype("auto", device)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(4):
            left @ right
        end.record()
        torch.cuda.synchronize(device)
        best = max(best, 4 * 2 * size**3 / (start.elapsed_time(end) / 1000))
    return best


def copy_to_device(
    values: np.ndarray[Any, Any] | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
    """Copy an array or a list to a device, without waiting for work already queued on a GPU."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a CUDA graph would copy freed host memory at each replay")
    array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if array else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class PendingCopy:
    """An asynchronous copy of a tensor to the host; reading it waits for this copy only, not for later work."""

    def __init__(self, tensor: Tensor) -> None:
        self._finished: Any = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._finished.record()

    @property
    def ready(self) -> bool:
        """True if the copy has finished."""
        return self._finished is None or bool(self._finished.query())

    def values(self) -> Any:
        """The values as a list; waits until the copy has finished."""
        return self.array().tolist()

    def array(self) -> Any:
        """The values as an array; waits until the copy has finished."""
        if self._finished is not None:
            self._finished.synchronize()
        return self._host.numpy()


class PinnedBuffers:
    """Pinned host memory for saving fp32 tensors, allocated in a background thread and cached by torch's allocator.

    Allocating it is several times slower than copying to it (about a second for 1.5 GB); the first save would wait.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._thread = threading.Thread(target=self._allocate, args=(sizes,), name="pinned-buffers")
        self._thread.start()

    @staticmethod
    def _allocate(sizes: Sequence[int]) -> None:
        with suppress(RuntimeError):  # out of pinned memory
            # All are held at the same time, so that torch's allocator caches a buffer for each.
            _ = [torch.empty(size, dtype=torch.float32, pin_memory=True) for size in sizes]

    def close(self) -> None:
        """Wait until the memory is allocated."""
        self._thread.join()
