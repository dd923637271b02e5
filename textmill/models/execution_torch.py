"""How a net is run: what comes before its blocks, one block, and what comes after, each eager or compiled.

A compiler that gets an entire net works longer the deeper the net is, on blocks that are all alike: here it gets one block, and the
program serves all of them. A block's gradients are ready when its backward ends, so that communication overlaps with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _begin(net: Any, *given: Any) -> Any:
    return net.begin(*given)


def _compute(block: Any, *given: Any) -> Any:
    return block.compute(*given)


def _end(net: Any, *given: Any) -> Any:
    return net.end(*given)


@dataclass(frozen=True)
class Execution:
    """Functions that call a net's `begin` and `end` and a block's `compute`, inside the hooks around a block."""

    begin: Callable[..., Any] = _begin
    compute: Callable[..., Any] = _compute
    end: Callable[..., Any] = _end


EAGER = Execution()


def compiled_execution(**settings: Any) -> Execution:
    """Each function compiled at its first call; the settings are torch.compile's."""
    return Execution(*(torch.compile(part, dynamic=False, **settings) for part in (_begin, _compute, _end)))
