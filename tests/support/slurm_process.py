"""SLURM on this machine for tests: its controller and one node, both as this user, on free ports.

TEXTMILL_TEST_SLURM may hold more lines of slurm.conf, such as PluginDir=..., separated by semicolons.
"""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.programs import find_program
from tests.support.waiting import wait_for
from textmill.verification.launcher import free_port

PROGRAMS = ("slurmctld", "slurmd", "srun", "sinfo")
CONFIG = """\
ClusterName=textmill
SlurmctldHost=localhost(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
SlurmctldPort={controller_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def one_node_slurm(folder: Path) -> Iterator[dict[str, str]]:
    """Start SLURM; yield the environment in which srun finds it."""
    programs = {name: find_program(name) for name in PROGRAMS}
    folder.mkdir(parents=True)
    for name in ("state", "spool"):
        (folder / name).mkdir()
    ports = {"controller_port": free_port(), "node_port": free_port()}
    config = CONFIG.format(user=getpass.getuser(), folder=folder, **ports)
    config += "".join(f"{line}\n" for line in os.environ.get("TEXTMILL_TEST_SLURM", "").split(";"))
    (folder / "slurm.conf").write_text(config)
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with ExitStack() as stack:
        for words in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-N", "localhost"]):
            log = stack.enter_context((folder / f"{words[0]}.log").open("w"))
            process = subprocess.Popen(
                [programs[words[0]], *words[1:]], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)

        def is_idle() -> bool:
            found = subprocess.run(
                [programs["sinfo"], "-h", "-o", "%T"], env=environment, capture_output=True, text=True
            )
            return found.stdout.strip() == "idle"

        wait_for(is_idle, lambda: [path.read_text()[-1500:] for path in sorted(folder.glob("*.log"))])
        yield environment
