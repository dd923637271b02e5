"""The command verify: check a family's contract; train a small copy of a parallel config on this machine, compare it
with one process, and name the likely cause of a difference.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from textmill.config import RunConfig
from textmill.config.load import build_config, merge_trees, parse_settings
from textmill.errors import TextmillError
from textmill.models import open_family
from textmill.models.contract_torch import check_family
from textmill.verification.launcher import TrialResult, launch
from textmill.verification.small_config import VOCAB, PrecisionTrial, VerificationPlan, build_plan
from textmill.where import Settings, open_config


class MeshMismatch(TextmillError):
    """The mesh computes other numbers than one process: a bug, not a user's mistake."""

    exit_code = 1


def verify(where: RunConfig | str | Path, settings: Settings = ()) -> None:
    """Check that the config's mesh gives the numbers of one process, or the contract of the family in a file.py."""
    start = time.monotonic()
    if str(where).endswith(".py"):
        verify_family(str(where), settings)
        return
    config = open_config(where, settings)
    plan = build_plan(config)
    print(f"verify: {plan.describe()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="textmill-verify-") as folder:
        single, parallel = launch(
            [(plan.single, Path(folder) / "single", 1), (plan.parallel, Path(folder) / "parallel", plan.processes)]
        )
    failed: list[Comparison] = []
    for trial, one, many in zip(plan.trials, single, parallel, strict=True):
        comparisons = compare_trial(trial, one, many)
        if trial.compiled and not failed:
            hint = "only the compiled net differs: set engine.compile=false"
            comparisons = [replace(comparison, hint=hint) for comparison in comparisons]
        failed += [comparison for comparison in comparisons if not comparison.passed]
        for comparison in comparisons:
            print(f"  {trial.name:<5} {comparison.format_line()}", flush=True)
    _conclude(plan, failed, time.monotonic() - start)


def verify_family(path: str, settings: Settings) -> None:
    """Print each property of the contract that a family in the user's own file keeps; the first broken one is an
    error."""
    start = time.process_time()
    family = open_family(path)
    sizes = getattr(family, "SIZES", {})
    given = {"model.family": path} | ({"model.size": next(iter(sizes))} if sizes and "small" not in sizes else {})
    model = build_config(merge_trees(parse_settings(given), parse_settings(settings))).model
    shape = family.shape_of(model, vocab=VOCAB, eos_id=0)
    check_family(model, shape, lambda line: print(f"  ok  {line}", flush=True))
    print(f"verify: {family.NAME} keeps the contract of a family ({time.process_time() - start:.1f} s)")


def _conclude(plan: VerificationPlan, failed: list[Comparison], seconds: float) -> None:
    if failed:
        sys.stdout.flush()
        hint = next((comparison.hint for comparison in failed if comparison.hint), "")
        raise MeshMismatch(
            f"verify: {plan.mesh} does not give the numbers of {plan.reference}: "
            f"{failed[0].what}{'; ' if hint else ''}{hint}"
        )
    print(f"verify: {plan.mesh} gives the numbers of {plan.reference} ({seconds:.0f} s)")


Gradients = dict[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Comparison:
    """One comparison of two trials."""

    what: str
    """What was compared, and where the difference is largest."""
    difference: float
    bound: float
    hint: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is within the bound; a NaN is not."""
        return self.difference <= self.bound

    def format_line(self) -> str:
        """A line of the report."""
        verdict = "equal" if self.passed else "DIFFERS"
        return f"{verdict:<7} {self.what}: difference {self.difference:.1e}, allowed {self.bound:.0e}"


def compare_trial(trial: PrecisionTrial, single: TrialResult, parallel: TrialResult) -> list[Comparison]:
    """All comparisons of a trial."""
    tokens = max(abs(a["loss_tokens"] - b["loss_tokens"]) for a, b in zip(single.steps, parallel.steps, strict=True))
    comparisons = [
        Comparison("loss tokens of each step", tokens, 0.0, "loss tokens are not counted over all processes"),
        _compare_steps("losses", "loss", single, parallel, trial.loss_bound),
        _compare_steps("gradient norms", "norm", single, parallel, max(trial.loss_bound, trial.gradient_bound)),
        _compare_gradients(trial, single, parallel),
        Comparison("evaluation loss", _relative(single.valid[0], parallel.valid[0]), trial.loss_bound),
    ]
    hashes = parallel.weight_hashes
    if len(hashes) > 1:
        drifted = [rank for rank, rank_hash in enumerate(hashes) if rank_hash != hashes[0]]
        hint = f"the weights of process {drifted[0]} drifted: replicas are not updated equally" if drifted else ""
        comparisons.append(Comparison(f"weights of all {len(hashes)} processes", float(len(drifted)), 0.0, hint))
    return comparisons


def _compare_steps(what: str, key: str, single: TrialResult, parallel: TrialResult, bound: float) -> Comparison:
    """The step with the largest difference, or the first beyond the bound."""
    differences = [_relative(a[key], b[key]) for a, b in zip(single.steps, parallel.steps, strict=True)]
    beyond = [number for number, difference in enumerate(differences) if not difference <= bound]
    if not beyond:
        return Comparison(f"{what} of {len(differences)} steps", max(differences), bound)
    step = beyond[0]
    ratio = parallel.steps[step][key] / single.steps[step][key] if single.steps[step][key] else math.inf
    hint = "the first step already differs: check forward and the count of loss tokens"
    return Comparison(
        f"{what} from step {step + 1} on (there {ratio:.4g} times that of one process)",
        differences[step],
        bound,
        hint if step == 0 and key == "loss" else "",
    )


def _compare_gradients(trial: PrecisionTrial, single: TrialResult, parallel: TrialResult) -> Comparison:
    """The first step's gradients as the optimizer received them, by weight, relative to the global norm."""
    expected = dict(single.gradients)
    actual = dict(parallel.gradients)
    if expected.keys() != actual.keys() or not expected:
        unmatched = sorted(expected.keys() ^ actual.keys()) or ["none"]
        what = f"gradients: {', '.join(unmatched[:3])} in one of the two trials only"
        return Comparison(what, math.inf, trial.gradient_bound)
    norm = math.sqrt(sum(float(np.square(values, dtype=np.float64).sum()) for values in expected.values())) or 1.0
    differences = {
        name: float(np.linalg.norm((actual[name] - values).astype(np.float64))) / norm
        for name, values in expected.items()
    }
    worst = max(differences, key=lambda name: differences[name])
    wrong = [
        name.partition("/")[2] for name, difference in differences.items() if not difference <= trial.gradient_bound
    ]
    if not wrong:
        return Comparison(f"gradients of {len(differences)} weights", differences[worst], trial.gradient_bound)
    what = f"gradients of {len(wrong)} of {len(differences)} weights, {worst.partition('/')[2]} most"
    return Comparison(what, differences[worst], trial.gradient_bound, _find_cause(trial, wrong, expected, actual))


def _find_cause(trial: PrecisionTrial, wrong: list[str], expected: Gradients, actual: Gradients) -> str:
    """The likely cause of a pattern of wrong gradients; `wrong` has their names."""
    count = len(expected)
    if trial.replicated.issuperset(wrong) and len(wrong) < count:
        return "only weights that every rank has in full differ: their gradients are not summed over the right ranks"
    # The factor by which each gradient is too large, by least squares.
    ratios = [
        float(np.vdot(actual[name], values) / max(1e-30, float(np.vdot(values, values))))
        for name, values in expected.items()
    ]
    if len(wrong) == count and max(ratios) - min(ratios) < 1e-3 * abs(ratios[0]):
        return (
            f"every gradient is {ratios[0]:.4g} times that of one process: "
            "a sum or a mean over processes or micro-batches is wrong"
        )
    if len(wrong) <= count // 2:
        return f"the others are right: check {', '.join(wrong[:4])}"
    return "most weights differ: samples, masks or sums are not those of one process"


def _relative(expected: float, actual: float) -> float:
    difference = abs(actual - expected) / max(abs(expected), 1e-12)
    return difference if math.isfinite(difference) else math.inf
