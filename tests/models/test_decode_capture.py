"""Warming up captures exactly the CUDA graphs that requests can need."""

from __future__ import annotations

import pytest
import torch

from textmill.models.decode_torch import CapturedSlots, prefill_shapes, step_sizes
from textmill.models.gpt2 import family as gpt2
from textmill.models.gpt2 import net_torch as gpt2_torch


class Needed(Exception):
    """Raised when a shape is captured that was not captured in advance."""


@pytest.mark.parametrize(("slots", "length"), [(1, 16), (3, 40), (6, 64), (8, 33), (70, 130), (5, 4200)])
def test_every_needed_shape_is_captured_in_advance(monkeypatch: pytest.MonkeyPatch, slots: int, length: int) -> None:
    net = gpt2_torch.Net(gpt2.Shape(layers=1, heads=1, width=4, inner=4, positions=length, vocab=8, eos_id=0))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    memory, steps, prefills = CapturedSlots(net, slots, length), set[int](), set[tuple[int, int]]()

    def step(count: int) -> None:
        steps.add(count)
        raise Needed

    def prefill(rows: int, tokens: int) -> None:
        prefills.add((rows, tokens))
        raise Needed

    monkeypatch.setattr(memory, "_step_graph", step)
    monkeypatch.setattr(memory, "_prefill_graph", prefill)
    monkeypatch.setattr(memory, "_read", lambda *_: None)
    near = {2**power + more for power in range(5, 13) for more in (-1, 0, 1)} | {1, 2, length - 1}
    for count in range(1, slots + 1):
        with pytest.raises(Needed):
            memory.decode(torch.zeros(count, dtype=torch.long), [0] * count)
        for tokens in [tokens for tokens in near if tokens < length]:
            try:
                memory.prefill(0, [[0] * tokens] * count)
            except Needed:
                continue
    assert step_sizes(slots) == sorted(steps)
    assert prefill_shapes(slots, length) == sorted(prefills)
