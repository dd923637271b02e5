"""What a GPU captures before the first request is exactly what requests can come to ask for."""

from __future__ import annotations

import pytest
import torch

from textmill.models.gpt2 import facts as gpt2
from textmill.models.gpt2 import net_torch as gpt2_torch
from textmill.models.gpt2.decode_torch import Slots, readings_of, steps_of


class Asked(Exception):
    """A captured shape was asked for."""


@pytest.mark.parametrize(("slots", "length"), [(1, 16), (3, 40), (6, 64), (8, 33), (70, 130), (5, 4200)])
def test_everything_asked_for_is_captured_before(monkeypatch: pytest.MonkeyPatch, slots: int, length: int) -> None:
    net = gpt2_torch.Net(gpt2.Shape(layers=1, heads=1, width=4, inner=4, positions=length, vocab=8, end=0))
    memory, steps, readings = Slots(net, slots, length), set[int](), set[tuple[int, int]]()
    assert memory.warm() == 0, "a CPU captures nothing"

    def step(count: int) -> None:
        steps.add(count)
        raise Asked

    def reading(rows: int, long: int) -> None:
        readings.add((rows, long))
        raise Asked

    memory.captured = True
    monkeypatch.setattr(memory, "_graph_of", step)
    monkeypatch.setattr(memory, "_reading_of", reading)
    monkeypatch.setattr(memory, "_read", lambda *_: None)
    near = {2**power + more for power in range(5, 13) for more in (-1, 0, 1)} | {1, 2, length - 1}
    for count in range(1, slots + 1):
        with pytest.raises(Asked):
            memory.decode(torch.zeros(count, dtype=torch.long), [0] * count)
        for long in [long for long in near if long < length]:
            try:
                memory.prefill(0, [[0] * long] * count)
            except Asked:
                continue
    assert steps_of(slots) == sorted(steps)
    assert readings_of(slots, length) == sorted(readings)
