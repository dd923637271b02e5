"""The command verify: a small copy of a run's parallel config, on processes of this machine, against one process."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.verification.comparison import Finding, findings_of
from textmill.verification.launcher import launch
from textmill.verification.small_config import Plan, plan_of


class Parted(TextmillError):
    """Processes that should agree do not: no mistake of the user's."""

    exit_code = 1


def verify(config: RunConfig) -> None:
    """Prove that the config's mesh gives the numbers of one process; say where they part if they do not."""
    began, plan = time.monotonic(), plan_of(config)
    print(f"verify: {plan.spoken()}", flush=True)
    with tempfile.TemporaryDirectory(prefix="textmill-verify-") as folder:
        alone, many = launch(
            [(plan.alone, Path(folder) / "alone", 1), (plan.many, Path(folder) / "many", plan.processes)]
        )
    faults: list[Finding] = []
    for trial, one, other in zip(plan.trials, alone, many, strict=True):
        found = findings_of(trial, one, other)
        faults += [finding for finding in found if not finding.holds]
        for finding in found:
            print(f"  {trial.precision:<5} {finding.spoken()}", flush=True)
    _conclude(plan, faults, time.monotonic() - began)


def _conclude(plan: Plan, faults: list[Finding], seconds: float) -> None:
    if faults:
        sys.stdout.flush()
        hint = next((finding.hint for finding in faults if finding.hint), "")
        raise Parted(
            f"verify: {plan.mesh} does not give the numbers of {plan.one}: {faults[0].what}{'; ' if hint else ''}{hint}"
        )
    print(f"verify: {plan.mesh} gives the numbers of {plan.one} ({seconds:.0f} s)")
