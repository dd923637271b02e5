"""Spikes: a step whose loss is far above those before it changes nothing. One rule for every engine, decided on its device.

A loss is a spike when loss > level + train.spikes.threshold x spread, where of the losses w of the last train.spikes.window updates

    level = median(w)
    spread = 1.4826 x median(|w - level|)

and as many updates are behind it. What was left out is no update, so a spike does not lift the level.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from textmill.config import TrainConfig

NORMAL = 1.4826
"""The standard deviation of normal numbers, in median distances from their median."""

State = dict[str, Any]
"""`window`: the losses of the last updates, oldest first, NaN where there were none yet.
`left`: updates left out in all; `streak`: in a row up to now; `last`: the step of the last one."""


class Guard:
    """What an engine remembers of losses; only a log or a checkpoint reads it from the device."""

    def __init__(self, xp: Any, deviations: float, window: int, put: Callable[[Any], Any]) -> None:
        """`xp` is torch, jax.numpy or numpy itself; `put` lays a numpy array on the engine's devices."""
        self.xp, self.deviations, self.window, self.put = xp, deviations, window, put
        self.take({})

    def judged(self, state: State, loss: Any) -> Any:
        """Whether a loss is a spike, as an array; pure."""
        window = state["window"]
        level = self._median(window)
        spread = NORMAL * self._median(abs(window - level))
        return self.xp.isfinite(window[0]) & self.xp.isfinite(loss) & (loss > level + self.deviations * spread)

    def after(self, state: State, loss: Any, spike: Any, finite: Any, step: Any) -> State:
        """The state after a step; pure."""
        where, done = self.xp.where, finite & ~spike
        return {
            "window": where(done, self.xp.concatenate([state["window"][1:], loss[None]]), state["window"]),
            "left": state["left"] + spike,
            "streak": where(done, 0, state["streak"] + spike),
            "last": where(spike, step, state["last"]),
        }

    def _median(self, values: Any) -> Any:
        ordered = (
            self.xp.msort(values) if hasattr(self.xp, "msort") else self.xp.sort(values)
        )  # torch's own sort gives places too
        return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2

    def counts(self) -> dict[str, int]:
        """Updates left out in all, in a row up to now, and the step (from 1) of the last one."""
        return {name: int(value) for name, value in self.state.items() if name != "window"}

    def saved(self) -> dict[str, Any]:
        """All that it goes on from, for a checkpoint's JSON."""
        return {"window": [loss for loss in self.state["window"].tolist() if np.isfinite(loss)], **self.counts()}

    def take(self, saved: dict[str, Any]) -> None:
        """Go on from a state; from none, anew."""
        losses = np.array(saved.get("window", []), np.float32)[-self.window :]
        window = np.concatenate([np.full(self.window - len(losses), np.nan, np.float32), losses])
        counts = {name: self.put(np.array(saved.get(name, 0), np.int32)) for name in ("left", "streak", "last")}
        self.state: State = {"window": self.put(window), **counts}


def new_guard(train: TrainConfig, xp: Any, put: Callable[[Any], Any]) -> Guard | None:
    """The guard that `train.spikes.threshold` asks for."""
    return None if train.spikes.threshold is None else Guard(xp, train.spikes.threshold, train.spikes.window, put)
