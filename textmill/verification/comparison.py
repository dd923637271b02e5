"""Two trials side by side: what was compared, how far apart it lies, and what that points to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from textmill.verification.launcher import Seen
from textmill.verification.small_config import Trial

Gradients = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Finding:
    """One comparison."""

    what: str
    """What was compared, and where it lies farthest apart."""
    apart: float
    bound: float
    hint: str = ""

    @property
    def holds(self) -> bool:
        """Whether both are equal as far as they can be."""
        return self.apart <= self.bound

    def spoken(self) -> str:
        """A line of the report."""
        verdict = "equal" if self.holds else "PARTED"
        return f"{verdict:<7} {self.what}: {self.apart:.1e} apart, at most {self.bound:.0e}"


def findings_of(trial: Trial, one: Seen, many: Seen) -> list[Finding]:
    """All comparisons of a trial."""
    asked = max(abs(a["asked"] - b["asked"]) for a, b in zip(one.steps, many.steps, strict=True))
    drifted = [rank for rank, copy in enumerate(many.copies) if copy != many.copies[0]]
    hint = f"process {drifted[0]} went its own way: what is copied is not updated alike everywhere" if drifted else ""
    copies = (
        [Finding(f"weights of all {len(many.copies)} processes", float(len(drifted)), 0.0, hint)]
        if len(many.copies) > 1
        else []
    )
    return [
        Finding("tokens asked in each step", asked, 0.0, "tokens are not counted over all processes"),
        _farthest("losses", "loss", one, many, trial.loss_bound),
        _farthest("gradient norms", "norm", one, many, max(trial.loss_bound, trial.gradient_bound)),
        _gradients(trial, one, many),
        Finding("the loss of an evaluation", _relative(one.valid[0], many.valid[0]), trial.loss_bound),
        *copies,
    ]


def _farthest(what: str, key: str, one: Seen, many: Seen, bound: float) -> Finding:
    """The step whose numbers lie farthest apart, or the first beyond the bound."""
    differences = [_relative(a[key], b[key]) for a, b in zip(one.steps, many.steps, strict=True)]
    beyond = [number for number, apart in enumerate(differences) if not apart <= bound]
    if not beyond:
        return Finding(f"{what} of {len(differences)} steps", max(differences), bound)
    step = beyond[0]
    ratio = many.steps[step][key] / one.steps[step][key] if one.steps[step][key] else math.inf
    hint = "the first step already differs: forward or the count of tokens" if step == 0 and key == "loss" else ""
    return Finding(
        f"{what} from step {step + 1} on (there {ratio:.4g} times that of one process)", differences[step], bound, hint
    )


def _gradients(trial: Trial, one: Seen, many: Seen) -> Finding:
    """The first step's gradients as the optimizer took them, tensor by tensor, against the norm of all."""
    ours, theirs = dict(one.gradients), dict(many.gradients)
    if ours.keys() != theirs.keys() or not ours:
        odd = sorted(ours.keys() ^ theirs.keys()) or ["none"]
        return Finding(f"gradients: {', '.join(odd[:3])} on one side only", math.inf, trial.gradient_bound)
    whole = math.sqrt(sum(float(np.square(values, dtype=np.float64).sum()) for values in ours.values())) or 1.0
    parts = {
        name: float(np.linalg.norm((theirs[name] - values).astype(np.float64))) / whole for name, values in ours.items()
    }
    worst = max(parts, key=lambda name: parts[name])
    beyond = [name.partition("/")[2] for name, apart in parts.items() if not apart <= trial.gradient_bound]
    if not beyond:
        return Finding(f"gradients of {len(parts)} weights", parts[worst], trial.gradient_bound)
    where = f"gradients of {len(beyond)} of {len(parts)} weights, {worst.partition('/')[2]} most"
    return Finding(where, parts[worst], trial.gradient_bound, _hint(trial, beyond, ours, theirs))


def _hint(trial: Trial, beyond: list[str], ours: Gradients, theirs: Gradients) -> str:
    """What a pattern of wrong gradients points to."""
    of = len(ours)
    if trial.replicated.issuperset(beyond) and len(beyond) < of:
        return "only what every rank has all of differs: its gradients are not summed over the right ranks"
    ratios = [
        float(np.vdot(theirs[name], ours[name]) / max(1e-30, float(np.vdot(ours[name], ours[name])))) for name in ours
    ]
    if len(beyond) == of and max(ratios) - min(ratios) < 1e-3 * abs(ratios[0]):
        return f"every gradient is {ratios[0]:.4g} times that of one process: a sum or a mean over processes or micro-batches is wrong"
    if len(beyond) <= of // 2:
        return f"the others are right: look at {', '.join(beyond[:4])}"
    return "most weights differ: samples, masks or sums are not those of one process"


def _relative(one: float, other: float) -> float:
    apart = abs(other - one) / max(abs(one), 1e-12)
    return apart if math.isfinite(apart) else math.inf
