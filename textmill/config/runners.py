"""Sections of the runners of data work: one class per kind."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from textmill.config.section import Section, changeable, path
from textmill.errors import TextmillError


class LocalRunner(Section):
    """Run data work in processes of this machine."""

    kind: Literal["local"] = changeable("local")
    """local: a pool of processes on this machine."""
    workers: int | Literal["auto"] = changeable("auto")
    """Processes at a time; auto: one per core."""

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise TextmillError(f"runner.workers: found {value}; give 1 or more, or auto")
        return value


class BeamRunner(Section):
    """Run data work with Apache Beam, on this machine or on any engine that Beam supports."""

    kind: Literal["beam"] = changeable("beam")
    """beam: an Apache Beam pipeline (extra: textmill[beam])."""
    options: list[str] = changeable([])
    """Beam's own options, such as `--runner=FlinkRunner`; default: its direct runner, on this machine."""
    shared_folder: str | None = path()
    """A folder that every worker can reach, for their results; default: a temporary folder of this machine."""


RunnerConfig = LocalRunner | BeamRunner
