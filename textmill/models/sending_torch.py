"""Numbers on their way from the host to a device, and back."""

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


class OnItsWay:
    """A copy of a tensor for the host that nobody waits for until it is read, and then for no work that was begun after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._landed: Any = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
            self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._landed.record()

    @property
    def there(self) -> bool:
        """Whether it has come."""
        return self._landed is None or bool(self._landed.query())

    def values(self) -> Any:
        """Its numbers as a list."""
        if self._landed is not None:
            self._landed.synchronize()
        return self._host.tolist()
