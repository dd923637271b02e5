"""Lion (Chen et al., 2023): the sign of a momentum. Its learning rate is a third to a tenth of AdamW's.

textmill train quickstart train.optimizer=./examples/lion.py train.learning_rate=2e-4
"""

from __future__ import annotations

from torch import Tensor

STATE = ("momentum",)
"""The tensors of each weight that are saved: zeros before the first update."""
ELEMENTWISE = True
"""Each number is updated alone, so that a process may update its part of a weight."""


def update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, decay: float) -> None:
    """Change a weight and its state in place."""
    momentum = state["momentum"]
    direction = momentum.lerp(gradient, 0.1).sign_()
    parameter.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    momentum.lerp_(gradient, 0.01)
