"""Programs that only some machines have."""

from __future__ import annotations

import os
import shutil

import pytest


def find_program(name: str) -> str:
    """A program on the PATH or in sbin; the test is skipped, with the package's name, if it is not installed."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if found is None:
        packages = {"mpirun": "openmpi-bin", "nginx": "nginx"}
        pytest.skip(f"needs {name} (Debian: {packages.get(name, 'slurmctld, slurmd and slurm-client')})")
    return found
