"""TorchStep: the results of one optimizer step, copied to the host asynchronously."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from textmill.kernels.transfer_torch import PendingCopy


class TorchStep:
    """Reading a value waits for this step, but not for later ones."""

    def __init__(
        self,
        loss: Tensor,
        norm: Tensor,
        loss_tokens: int,
        scale: Tensor | None = None,
        note: str | None = None,
        terms: dict[str, Tensor] | None = None,
    ) -> None:
        self._terms = list(terms or {})
        self._scaled = scale is not None
        numbers = [loss, norm, *(terms or {}).values(), *([] if scale is None else [scale])]
        self.loss_tokens = loss_tokens
        self.note = note
        self._numbers = PendingCopy(torch.stack([number.to(loss) for number in numbers]))

    @property
    def ready(self) -> bool:
        """Whether the values can be read without waiting."""
        return self._numbers.ready

    @property
    def loss(self) -> float:
        """The step's loss before the update."""
        return float(self._numbers.values()[0])

    @property
    def norm(self) -> float:
        """The global gradient norm before clipping."""
        return float(self._numbers.values()[1])

    @property
    def terms(self) -> dict[str, float]:
        """Other terms of the objective."""
        return dict(zip(self._terms, self._numbers.values()[2:], strict=False))

    @property
    def skipped(self) -> bool:
        """Whether the update was skipped, because loss or gradient was not finite."""
        return not math.isfinite(self.norm)

    @property
    def scale(self) -> float | None:
        """The loss scale in fp16."""
        return self._numbers.values()[-1] if self._scaled else None
