"""Loss spikes: the update of a step whose loss is far above the recent ones is skipped, in every engine.

A loss is a spike if loss > level + train.spike_threshold x spread, where w are the losses of the last 128
updates and

    level = median(w)
    spread = 1.4826 x median(|w - level|)

There are no spikes before the window is full. A skipped update does not enter the window, so a spike does not raise
the level. The decision is computed on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from textmill.config import TrainConfig

WINDOW = 128
"""How many losses give the median."""
MAD_TO_STD = 1.4826
"""The standard deviation of a normal distribution, divided by its median absolute deviation."""

State = dict[str, Any]
"""`window`: losses of the last updates, oldest first, NaN where there were none yet.
`left`: updates skipped so far; `streak`: skipped in a row; `last`: the step of the last skipped one."""


class SpikeGuard:
    """The spike detector of an engine; its state stays on the device until it is logged or saved."""

    def __init__(self, xp: Any, threshold: float, window: int, put: Callable[[Any], Any]) -> None:
        """`xp` is torch, jax.numpy or numpy; `put` copies a numpy array to the engine's devices."""
        self.xp = xp
        self.threshold = threshold
        self.window = window
        self.put = put
        self.load_state({})

    def is_spike(self, state: State, loss: Any) -> Any:
        """Whether a loss is a spike, as a boolean array; a pure function."""
        window = state["window"]
        level = self._median(window)
        spread = MAD_TO_STD * self._median(abs(window - level))
        return self.xp.isfinite(window[0]) & self.xp.isfinite(loss) & (loss > level + self.threshold * spread)

    def next_state(self, state: State, loss: Any, spike: Any, finite: Any, step: Any) -> State:
        """The state after a step; a pure function."""
        where = self.xp.where
        updated = finite & ~spike
        return {
            "window": where(updated, self.xp.concatenate([state["window"][1:], loss[None]]), state["window"]),
            "left": state["left"] + spike,
            "streak": where(updated, 0, state["streak"] + spike),
            "last": where(spike, step, state["last"]),
        }

    def _median(self, values: Any) -> Any:
        # torch.sort returns indices too; torch.msort does not.
        ordered = self.xp.msort(values) if hasattr(self.xp, "msort") else self.xp.sort(values)
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2

    def counts(self) -> dict[str, int]:
        """Updates skipped so far, skipped in a row, and the step (from 1) of the last one."""
        return {name: int(value) for name, value in self.state.items() if name != "window"}

    def save_state(self) -> dict[str, Any]:
        """The state for a checkpoint's JSON."""
        return {"window": [loss for loss in self.state["window"].tolist() if np.isfinite(loss)], **self.counts()}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Resume from a saved state; an empty one starts from scratch."""
        losses = np.array(saved.get("window", []), np.float32)[-self.window :]
        window = np.concatenate([np.full(self.window - len(losses), np.nan, np.float32), losses])
        counts = {name: self.put(np.array(saved.get(name, 0), np.int32)) for name in ("left", "streak", "last")}
        self.state: State = {"window": self.put(window), **counts}


def new_spike_guard(train: TrainConfig, xp: Any, put: Callable[[Any], Any]) -> SpikeGuard | None:
    """The guard, if `train.spike_threshold` is set."""
    return None if train.spike_threshold is None else SpikeGuard(xp, train.spike_threshold, WINDOW, put)
