"""TorchStep: the numbers of one optimizer step, copied to the host in the background."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from textmill.kernels.transfer_torch import OnItsWay


class TorchStep:
    """Reading a number waits for this step, and for none that was started after it."""

    def __init__(
        self, loss: Tensor, norm: Tensor, asked: int, scale: Tensor | None = None, news: str | None = None
    ) -> None:
        numbers = [loss, norm] if scale is None else [loss, norm, scale]
        self.asked, self.news, self._numbers = (
            asked,
            news,
            OnItsWay(torch.stack([number.to(loss) for number in numbers])),
        )

    @property
    def ready(self) -> bool:
        """Whether reading does not wait."""
        return self._numbers.there

    @property
    def loss(self) -> float:
        """The step's loss before the update."""
        return float(self._numbers.values()[0])

    @property
    def norm(self) -> float:
        """The global gradient norm before clipping."""
        return float(self._numbers.values()[1])

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped, because loss or gradient was not finite."""
        return not math.isfinite(self.norm)

    @property
    def scale(self) -> float | None:
        """What the loss was multiplied by in fp16."""
        return next(iter(self._numbers.values()[2:]), None)
