"""Asynchronous copies between host and device through pinned memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor


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
