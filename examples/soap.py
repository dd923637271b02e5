"""SOAP (Vyas et al., 2024): Adam in the eigenbasis of the gradients' second moments, for the matrices of blocks.

    textmill train quickstart train.optimizer=./examples/soap.py train.learning_rate=3e-3

AdamW updates all other weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from textmill.models import Weight

STATE = ("momentum", "variance")
BETAS = 0.95, 0.95
SECOND_MOMENTS = 0.95
EVERY = 10
"""Updates between two corrections of the eigenbasis."""


def takes(weight: Weight) -> bool:
    """The matrices of blocks."""
    return weight.muon


def new_state(parameter: Tensor) -> dict[str, Tensor]:
    """State of other shapes than the weight's."""
    rows, columns = parameter.shape
    sizes = {"left": rows, "right": columns, "left_basis": rows, "right_basis": columns}
    return {"steps": torch.zeros(())} | {name: torch.zeros(size, size) for name, size in sizes.items()}


def update(parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], lr: float, decay: float) -> None:
    """Change a weight and its state in place; the first gradient only chooses the basis."""
    steps = int(state["steps"])
    state["steps"] += 1
    for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
        moments, basis = state[side], state[f"{side}_basis"]
        moments.lerp_(product, 1 - SECOND_MOMENTS)
        if steps == 0:
            basis.copy_(torch.linalg.eigh(moments).eigenvectors)
        elif steps % EVERY == 0:
            basis.copy_(torch.linalg.qr(moments @ basis).Q)
    if steps == 0:
        return
    left, right = state["left_basis"], state["right_basis"]
    momentum = state["momentum"].lerp_(gradient, 1 - BETAS[0])
    variance = state["variance"].lerp_((left.T @ gradient @ right).square(), 1 - BETAS[1])
    step = left.T @ (momentum / (1 - BETAS[0] ** steps)) @ right
    step = left @ (step / ((variance / (1 - BETAS[1] ** steps)).sqrt() + 1e-8)) @ right.T
    parameter.mul_(1 - lr * decay).add_(step, alpha=-lr)
