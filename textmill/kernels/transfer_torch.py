"""Numbers on their way from the host to a device, and back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_device(
    values: np.ndarray[Any, Any] | Sequence[Any], device: torch.device, dtype: torch.dtype | None = None
) -> Tensor:
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


class Room:
    """Pinned host memory for float tensors, taken by a thread beside other work and left to torch, which gives it out again.

    A GPU writes to it several times faster than it can be had: about a second goes for 1.5 GB, where the first save would wait for it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._thread = threading.Thread(target=self._take, args=(sizes,), name="room")
        self._thread.start()

    @staticmethod
    def _take(sizes: Sequence[int]) -> None:
        with suppress(RuntimeError):  # no more of it to be had
            _ = [torch.empty(size, dtype=torch.float32, pin_memory=True) for size in sizes]  # all of it at a time

    def close(self) -> None:
        """Wait until it is taken."""
        self._thread.join()
