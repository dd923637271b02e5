"""Kill, stop or hang one rank at random steps; check that the job ends, names the right rank, and resumes.

python bench/kill_ranks.py [times] [seed]
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.kill_train import prepare_tokens, read_metrics, train_arguments
from textmill.verification.launcher import free_port

STEPS, TIMEOUT = 12, 4
KINDS = {"kill": "no heartbeat", "stop": "no heartbeat", "hang": "the other ranks wait for"}
"""The fault of a rank, and how the other ranks report it."""
LONGEST = 300
"""Seconds after which a job counts as hanging."""


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    code: int
    seconds: float
    output: str

    def names(self, kind: str, rank: int) -> bool:
        """True if the output names the faulty rank."""
        return re.search(rf"{KINDS[kind]}[^\n]*rank {rank} ", self.output) is not None

    @property
    def ranks_with_stacks(self) -> set[int]:
        """The ranks that reported where they were, with their stacks."""
        return {
            int(rank)
            for rank in re.findall(
                r"textmill: rank (\d+): in [^\n]*\n(?:[^\n]*\n)*?[^\n]*most recent call first", self.output
            )
        }


def rank_arguments(root: Path, run: Path, *more: str) -> list[str]:
    """Return the command-line arguments that train a small run on several ranks."""
    return [
        *train_arguments(root, run, STEPS),
        "train.save_every=4",
        "train.evaluate_every=1000",
        f"engine.timeout={TIMEOUT}",
        *more,
    ]


def run_torchrun(arguments: list[str], *, ranks: int = 2, fault: str = "") -> Ending:
    """Run a job under torchrun to its end; a job that hangs is an error."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "textmill",
    ]
    started = time.monotonic()
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, "TEXTMILL_FAULT": fault},
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    return Ending(done.returncode, time.monotonic() - started, done.stderr + done.stdout)


def run_ranks(
    arguments: list[str], *, ranks: int, fault: str, waits_for: list[int], before: str = ""
) -> dict[int, Ending]:
    """Run a job without a launcher, as srun would; return how the ranks in `waits_for` ended, and kill the others.

    `before` is Python code that each process runs first.
    """
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "TEXTMILL_FAULT": fault,
    }
    started, processes = time.monotonic(), []
    for rank in range(ranks):
        environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", f"{before}\nfrom textmill.cli import command; command()", *arguments]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        endings = {}
        for rank in waits_for:
            output, _ = processes[rank].communicate(timeout=LONGEST)
            endings[rank] = Ending(processes[rank].returncode, time.monotonic() - started, output)
        return endings
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(times: int = 20, seed: int = 1) -> int:
    """Run the campaign; its results go to docs/faults.md."""
    dice, longest, named, resumed, tried = random.Random(seed), 0.0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root, undisturbed = Path(folder), Path(folder) / "undisturbed"
        prepare_tokens(root)
        first = run_torchrun(rank_arguments(root, undisturbed))
        assert first.code == 0, first.output
        print(f"undisturbed: {first.seconds:.1f} s", flush=True)
        for number in range(times):
            kind, step, rank = list(KINDS)[number % 3], dice.randrange(1, STEPS), dice.randrange(2)
            run = root / f"run-{number}"
            ending = run_torchrun(rank_arguments(root, run), fault=f"{kind}@step:{step}:{rank}")
            right = (
                ending.code != 0 and ending.names(kind, rank) and json.loads((run / "stopped.json").read_text())["why"]
            )
            named, longest = named + bool(right), max(longest, ending.seconds - first.seconds)
            print(
                f"{kind} rank {rank} at step {step}: ended after {ending.seconds:.1f} s, named: {bool(right)}",
                flush=True,
            )
            if number % 4 == 0:
                again, tried = run_torchrun(rank_arguments(root, run)), tried + 1
                resumed += again.code == 0 and read_metrics(run) == read_metrics(undisturbed)
            if not right:
                print(ending.output)
        print(
            f"{times} killed, stopped or hanging ranks: 0 jobs hang, {named} ranks named; {resumed} of {tried} resumed "
            f"jobs are bitwise equal; at most {longest:.1f} s longer than an undisturbed job, "
            f"with engine.timeout={TIMEOUT}"
        )
    return 0 if named == times and resumed == tried else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
