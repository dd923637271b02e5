"""How a net is run: the part before its blocks, each block, and the part after, each eager or compiled.

All blocks are alike, so only one block is compiled, and all blocks share the compiled code: compile time does not grow
with depth. Each block's gradients are ready when its backward pass ends, so communication overlaps with the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _begin(net: Any, *arguments: Any) -> Any:
    return net.begin(*arguments)


def _compute(block: Any, *arguments: Any) -> Any:
    return block.compute(*arguments)


def _end(net: Any, *arguments: Any) -> Any:
    return net.end(*arguments)


@dataclass(frozen=True)
class Execution:
    """Functions that call a net's `begin` and `end` and a block's `compute`; hooks of FSDP stay outside of them."""

    begin: Callable[..., Any] = _begin
    compute: Callable[..., Any] = _compute
    end: Callable[..., Any] = _end


EAGER = Execution()


def compiled_execution(**settings: Any) -> Execution:
    """Each function compiled at its first call, with these settings of torch.compile."""
    return Execution(*(torch.compile(part, dynamic=False, **settings) for part in (_begin, _compute, _end)))
