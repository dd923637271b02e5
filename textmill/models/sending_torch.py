"""Numbers of the host on their way to a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(values: np.ndarray[Any, Any] | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """An array or a list on a device; what a GPU has to do before is not waited for."""
    array = isinstance(values, np.ndarray)
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if array else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
