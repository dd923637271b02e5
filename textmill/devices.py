"""Which device and which arithmetic: the words of the `engine` section made real."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from textmill.errors import TextmillError

# Dense bf16 products a second by the makers' sheets, for MFU; a card not named here shows none.
PEAK_FLOPS = {
    "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "GH200": 989e12, "B200": 2250e12, "A100": 312e12, "A800": 312e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "A40": 150e12, "A10": 125e12, "RTX 4090": 165e12, "RTX 3090": 71e12,
    "RTX 5090": 210e12,
}  # fmt: skip


def open_device(name: str) -> torch.device:
    """The device of `engine.device`; auto takes CUDA, then MPS, then the CPU, as does torch for what a TPU trained."""
    name = "auto" if name == "tpu" else name
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise TextmillError(f"engine.device: '{name}' is not there; found {count} CUDA devices; set engine.device=cpu")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels of our own are launched on the current one
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise TextmillError("engine.device: 'mps' is not there; set engine.device=cpu")
    return device


def torch_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products; auto: bf16 on a GPU that has it, fp16 on one of the generation before, else fp32.

    fp8 is for some products of training: all else that is done in it, and whoever uses the model later, works in bf16.
    """
    if name == "auto":
        name = _best_on(device)
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}[name]


def _best_on(device: torch.device) -> str:
    if device.type != "cuda":
        return "fp32"
    if torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16"
    return "fp16" if torch.cuda.get_device_capability(device)[0] == 7 else "fp32"


def check_fp8(device: torch.device) -> None:
    """Refuse to train in fp8 on a chip that has no such products."""
    if device.type != "cuda" or (found := torch.cuda.get_device_capability(device)) < (8, 9):
        what = f"found {device.type}" if device.type != "cuda" else f"this one has {found[0]}.{found[1]}"
        raise TextmillError(
            f"engine.precision: fp8 needs a GPU of compute capability 8.9 or more, {what}; set engine.precision=auto"
        )


def autocast(device: torch.device, precision: torch.dtype) -> AbstractContextManager[Any]:
    """Matrix products in a precision while weights stay fp32; training and evaluation share it, so that their losses agree."""
    return torch.autocast(device.type, precision) if precision != torch.float32 else nullcontext()


def peak_flops_of(device: torch.device) -> float | None:
    """The device's peak rate, where it is known."""
    if device.type != "cuda":
        return None
    return peak_flops_by_name(torch.cuda.get_device_name(device))


def peak_flops_by_name(card: str) -> float | None:
    """The peak rate of a card by its maker's name, where it is known."""
    return next((rate for name, rate in PEAK_FLOPS.items() if name in card), None)
