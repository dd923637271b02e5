"""A net by its parts: what is before its blocks, a block, and what is after; each as it is written, or compiled.

A compiler that is given a whole net works as long as the net is deep, and is given each block alike: here it sees one, and its work serves
for all. Gradients of a block are there when its backward is through, so that other processes may be met meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def _begin(net: Any, *given: Any) -> Any:
    return net.begin(*given)


def _work(block: Any, *given: Any) -> Any:
    return block.work(*given)


def _end(net: Any, *given: Any) -> Any:
    return net.end(*given)


@dataclass(frozen=True)
class Parts:
    """How a net's parts are run: `begin` and `end` of the net, `work` of a block, inside what hooks do around a block."""

    begin: Callable[..., Any] = _begin
    work: Callable[..., Any] = _work
    end: Callable[..., Any] = _end


PLAIN = Parts()


def compiled_parts(**settings: Any) -> Parts:
    """Each part compiled when it is first run; settings are torch's."""
    return Parts(*(torch.compile(part, dynamic=False, **settings) for part in (_begin, _work, _end)))
