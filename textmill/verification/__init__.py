"""The command verify: train a small copy of a parallel config on this machine and compare it with one process."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.verification.comparison import Comparison, compare_trial
from textmill.verification.launcher import launch
from textmill.verification.small_config import VerificationPlan, build_plan


class MeshMismatch(TextmillError):
    """The mesh computes other numbers than one process: a bug, not a user's mistake."""

    exit_code = 1


def verify(config: RunConfig) -> None:
    """Check that the config's mesh gives the numbers of one process; report where they differ."""
    start = time.monotonic()
    plan = build_plan(config)
    print(f"verify: {plan.describe()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="textmill-verify-") as folder:
        single, parallel = launch(
            [(plan.single, Path(folder) / "single", 1), (plan.parallel, Path(folder) / "parallel", plan.processes)]
        )
    failed: list[Comparison] = []
    for trial, one, many in zip(plan.trials, single, parallel, strict=True):
        comparisons = compare_trial(trial, one, many)
        failed += [comparison for comparison in comparisons if not comparison.passed]
        for comparison in comparisons:
            print(f"  {trial.precision:<5} {comparison.format_line()}", flush=True)
    _conclude(plan, failed, time.monotonic() - start)


def _conclude(plan: VerificationPlan, failed: list[Comparison], seconds: float) -> None:
    if failed:
        sys.stdout.flush()
        hint = next((comparison.hint for comparison in failed if comparison.hint), "")
        raise MeshMismatch(
            f"verify: {plan.mesh} does not give the numbers of {plan.reference}: "
            f"{failed[0].what}{'; ' if hint else ''}{hint}"
        )
    print(f"verify: {plan.mesh} gives the numbers of {plan.reference} ({seconds:.0f} s)")
