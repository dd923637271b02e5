"""CUDA graphs of passes on a machine without a GPU: whether there is one, and how gradients accumulate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from textmill.engines import cuda_graphs_torch
from textmill.engines.cuda_graphs_torch import GraphedPass


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that do nothing."""
    stream: Any = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", lambda one: nullcontext()),
        ("graph_pool_handle", lambda: None),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)


def test_a_net_with_an_unused_parameter_runs_without_a_graph() -> None:
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


def test_replayed_gradients_accumulate_like_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of three shapes, of which two get a graph; a replay writes into the tensors of the capture."""
    weight = nn.Parameter(torch.tensor([1.0, 2.0]))
    calls: list[Tensor] = []

    def run_pass(x: Tensor) -> Tensor:
        calls.append(x)
        loss = (weight**2 * x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @contextmanager
    def record(graph: Any, pool: Any) -> Iterator[None]:
        yield
        x, gradient = calls[-1], weight.grad
        assert gradient is not None
        graph.replay = lambda: gradient.copy_(2 * weight.detach() * x.sum(0))

    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_graphs_torch, "capture_graph", record)
    monkeypatch.setattr(cuda_graphs_torch, "MAX_GRAPHS", 2)
    graphed = GraphedPass(run_pass, [weight])
    for rows in ([1], [1, 1], [2, 1, 1, 2], [3], [1, 3, 2, 3, 1], [3, 2, 2]):
        weight.grad = None
        micro_batches = [torch.arange(2.0 * count).view(count, 2) + number for number, count in enumerate(rows)]
        for x in micro_batches:
            graphed(x)
        expected = 2 * weight.detach() * sum(x.sum(0) for x in micro_batches)
        assert weight.grad is not None
        assert weight.grad.tolist() == expected.tolist(), rows
    assert len(graphed.captured) == 2
