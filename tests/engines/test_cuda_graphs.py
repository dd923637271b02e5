"""CUDA graphs of passes: what decides whether there is one, on a machine without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from textmill.engines.cuda_graphs_torch import GraphedPass


def test_a_net_with_an_unused_parameter_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    stream: Any = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in (("Stream", lambda: stream), ("current_stream", lambda: stream),
                       ("stream", lambda one: nullcontext()), ("graph_pool_handle", lambda: None)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    used, unused = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0]))

    def run_pass(x: Tensor) -> Tensor:
        loss = (used * x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    graphed = GraphedPass(run_pass, [used, unused])
    losses = [graphed(torch.tensor([5.0, 7.0])).item() for _ in range(2)]
    assert losses == [19, 19]
    assert used.grad is not None
    assert used.grad.tolist() == [10, 14], "two passes, and none of those before a capture"
    assert unused.grad is None
    assert not graphed.captured
