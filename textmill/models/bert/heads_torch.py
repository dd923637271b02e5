"""The modules of BERT's heads in pretraining, under transformers' names. M tokens, P pairs, E width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from textmill.models.base_torch import ACTIVATIONS
from textmill.models.bert.facts import PAIR_CLASSES, Shape


class Transform(nn.Module):
    """What is computed from hidden states before the masked tokens' head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)
        self.LayerNorm = nn.LayerNorm(shape.width, shape.epsilon)
        self.activation = ACTIVATIONS[shape.activation]

    def forward(self, x_ME: Tensor) -> Tensor:
        out: Tensor = self.LayerNorm(self.activation(self.dense(x_ME)))
        return out


class Predictions(nn.Module):
    """The masked tokens' head; its matrix is the word embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(shape.padded_vocab))
        self.transform = Transform(shape)


class Heads(nn.Module):
    """The heads that the shape has, under transformers' names."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.masked_head:
            self.predictions = Predictions(shape)
        if shape.pair_head:
            self.seq_relationship = nn.Linear(shape.width, PAIR_CLASSES)


class Pooler(nn.Module):
    """What is computed from a sample's first token before the pairs' head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense = nn.Linear(shape.width, shape.width)

    def forward(self, x_PE: Tensor) -> Tensor:
        return torch.tanh(self.dense(x_PE))
