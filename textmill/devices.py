"""The torch device and precision that `engine.device` and `engine.precision` name."""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from textmill.errors import TextmillError, rank_of_launcher, warn

# Dense bf16 FLOP/s with fp32 sums from the data sheets, for MFU; V100 and T4: fp16; P100 and P40: fp32; RTX 30 to 50:
# twice their fp32 rate, which is what their tensor cores give with fp32 sums. Other GPUs show no MFU. A name that
# begins another one comes after it.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A40": 150e12,
    "A10": 125e12,
    "RTX 5090": 210e12,
    "RTX 5080": 113e12,
    "RTX 5070 Ti": 88e12,
    "RTX 5070": 62e12,
    "RTX 5060 Ti": 47e12,
    "RTX 5060": 38e12,
    "RTX 4090": 165e12,
    "RTX 4080": 97e12,
    "RTX 4070 Ti": 80e12,
    "RTX 4070": 58e12,
    "RTX 4060 Ti": 44e12,
    "RTX 4060": 30e12,
    "RTX 3090 Ti": 80e12,
    "RTX 3090": 71e12,
    "RTX 3080 Ti": 68e12,
    "RTX 3080": 60e12,
    "RTX 3070 Ti": 43e12,
    "RTX 3070": 41e12,
    "RTX 3060 Ti": 32e12,
    "RTX 3060": 25e12,
    "V100": 125e12,
    "T4": 65e12,
    "P100": 10.6e12,
    "P40": 12e12,
}
GPU_GB = {
    "H200": 140,
    "H100 PCIe": 80,
    "H100": 80,
    "GH200": 96,
    "B200": 180,
    "MI300X": 192,
    "A100": 80,
    "A800": 80,
    "L40S": 48,
    "L40": 48,
    "L4": 24,
    "A40": 48,
    "A10": 24,
    "RTX 5090": 32,
    "RTX 5080": 16,
    "RTX 5070 Ti": 16,
    "RTX 5070": 12,
    "RTX 5060 Ti": 16,
    "RTX 5060": 8,
    "RTX 4090": 24,
    "RTX 4080": 16,
    "RTX 4070 Ti": 12,
    "RTX 4070": 12,
    "RTX 4060 Ti": 16,
    "RTX 4060": 8,
    "RTX 3090 Ti": 24,
    "RTX 3090": 24,
    "RTX 3080 Ti": 12,
    "RTX 3080": 10,
    "RTX 3070 Ti": 8,
    "RTX 3070": 8,
    "RTX 3060 Ti": 8,
    "RTX 3060": 12,
    "V100": 32,
    "T4": 16,
    "P100": 16,
    "P40": 24,
}
"""Memory of the largest version of each GPU."""


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
    return next((rate for name, rate in PEAK_FLOPS.items() if name in gpu), None)


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
