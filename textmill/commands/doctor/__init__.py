"""The command doctor: runs small jobs to find what is wrong with this machine or project, and says how to fix it."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from textmill.commands.doctor.findings import BAD, GOOD, Finding
from textmill.commands.doctor.inputs import check_runner, check_sources, check_trackers_work
from textmill.commands.doctor.jobs import check_compile, check_kernel, check_processes, check_training
from textmill.commands.doctor.machine import check_clock, check_folder, check_limits, check_memory, check_shared_memory
from textmill.commands.doctor.software import check_extras, check_versions
from textmill.config import RunConfig
from textmill.errors import TextmillError
from textmill.where import open_where

Check = Callable[[], Finding | Iterable[Finding]]


class Unhealthy(TextmillError):
    """At least one check failed: not a mistake of the command line."""

    exit_code = 1


def doctor(where: str | None = None, settings: list[str] | None = None, as_json: bool = False) -> None:
    """Check this machine, and the project at WHERE if given; raises at the end if a check failed."""
    config = open_where(where, settings or []).config if where else None
    folder = Path(config.folder) if config else Path.cwd()
    found: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="textmill-doctor-", dir=_scratch(folder)) as scratch:
        for check in list_checks(folder, Path(scratch), config):
            for finding in run_check(check):
                found.append(finding)
                if not as_json:
                    print(finding.format(), flush=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in found], indent=2, ensure_ascii=False))
    bad = [finding.name for finding in found if finding.level == BAD]
    if bad:
        raise Unhealthy(f"doctor: {len(bad)} of {len(found)} checks failed: {', '.join(bad)}")
    if not as_json:
        warned = sum(finding.level != GOOD for finding in found)
        print(f"doctor: {len(found)} checks, {warned} with advice, none failed")


def list_checks(folder: Path, scratch: Path, config: RunConfig | None) -> list[Check]:
    """All checks, quick ones first; a project adds those of its inputs."""
    checks: list[Check] = [
        check_versions,
        lambda: check_extras(config),
        lambda: check_folder(folder),
        check_memory,
        check_shared_memory,
        check_limits,
        lambda: check_clock(scratch),
    ]
    if config is not None:
        checks += [
            lambda: check_sources(config),
            lambda: check_trackers_work(config),
            lambda: check_runner(config, scratch),
        ]
    device = config.engine.device if config else "auto"
    jobs: list[Check] = [lambda: check_training(scratch, device), lambda: check_processes(scratch)]
    return [*checks, check_kernel, *jobs, check_compile]


def run_check(check: Check) -> list[Finding]:
    """What a check found, with its seconds; a check that itself fails is a finding too."""
    start = time.monotonic()
    try:
        found = check()
    except Exception as error:
        text = str(error) if isinstance(error, TextmillError) else f"{type(error).__name__}: {error}"
        found = Finding("check", BAD, f"could not be run: {text}", "report this as a bug")
    findings = [found] if isinstance(found, Finding) else list(found)
    return [finding.after(time.monotonic() - start) for finding in findings]


def _scratch(folder: Path) -> Path | None:
    """Jobs run on the file system of the project, if it can be written to."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder):
        return folder
    return None
