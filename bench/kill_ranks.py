"""Kill, stop and hang one process of several at seeded steps; see that the job ends, that the right one is named, and that the run goes on.

python bench/kill_ranks.py [times] [seed]
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.kill_train import numbers_of, prepared, trained

STEPS, TIMEOUT = 12, 4
KINDS = {"kill": "no heartbeat", "stop": "no heartbeat", "hang": "the other ranks wait for"}
"""What is done to a process, and what the others say of it."""
LONGEST = 300


@dataclass(frozen=True)
class Ending:
    """How a job ended."""

    code: int
    seconds: float
    said: str

    def names(self, kind: str, rank: int) -> bool:
        """Whether the process to blame is named."""
        return re.search(rf"{KINDS[kind]}[^\n]*rank {rank} ", self.said) is not None

    @property
    def told(self) -> set[int]:
        """The processes that told where they were, with their stacks."""
        return {
            int(rank)
            for rank in re.findall(
                r"textmill: rank (\d+): in [^\n]*\n(?:[^\n]*\n)*?[^\n]*most recent call first", self.said
            )
        }


def words_of(root: Path, run: Path, *more: str) -> list[str]:
    """The words that train one small run on several processes."""
    return [
        *trained(root, run, STEPS),
        "train.save_every=4",
        "train.evaluate_every=1000",
        f"engine.timeout={TIMEOUT}",
        *more,
    ]


def launched(words: list[str], *, ranks: int = 2, fault: str = "") -> Ending:
    """One job under torchrun, to its end; a job that never ends is an error."""
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
    began = time.monotonic()
    done = subprocess.run(
        [*command, *words], env={**os.environ, "TEXTMILL_FAULT": fault}, capture_output=True, text=True, timeout=LONGEST
    )
    return Ending(done.returncode, time.monotonic() - began, done.stderr + done.stdout)


def started(words: list[str], *, ranks: int, fault: str, waits_for: list[int], before: str = "") -> dict[int, Ending]:
    """One job without a launcher, as srun would start it; how the processes that are waited for ended. What is left is killed.

    `before` is Python for each process to do first.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meet = {
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free.getsockname()[1]),
            "WORLD_SIZE": str(ranks),
            "TEXTMILL_FAULT": fault,
        }
    began, processes = time.monotonic(), []
    for rank in range(ranks):
        environment = {**os.environ, **meet, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [
            sys.executable,
            "-c",
            f"{before}\nimport sys; from textmill.cli import main; sys.exit(main())",
            *words,
        ]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        endings = {}
        for rank in waits_for:
            said, _ = processes[rank].communicate(timeout=LONGEST)
            endings[rank] = Ending(processes[rank].returncode, time.monotonic() - began, said)
        return endings
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main(times: int = 20, seed: int = 1) -> int:
    """The campaign; its figures go to docs/faults.md."""
    dice, longest, named, went_on, tried = random.Random(seed), 0.0, 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root, alone = Path(folder), Path(folder) / "alone"
        prepared(root)
        first = launched(words_of(root, alone))
        assert first.code == 0, first.said
        print(f"undisturbed: {first.seconds:.1f} s", flush=True)
        for number in range(times):
            kind, step, rank = list(KINDS)[number % 3], dice.randrange(1, STEPS), dice.randrange(2)
            run = root / f"run-{number}"
            ending = launched(words_of(root, run), fault=f"{kind}@step:{step}:{rank}")
            right = (
                ending.code != 0 and ending.names(kind, rank) and json.loads((run / "stopped.json").read_text())["why"]
            )
            named, longest = named + bool(right), max(longest, ending.seconds - first.seconds)
            print(
                f"{kind} rank {rank} at step {step}: over after {ending.seconds:.1f} s, named: {bool(right)}",
                flush=True,
            )
            if number % 4 == 0:
                again, tried = launched(words_of(root, run)), tried + 1
                went_on += again.code == 0 and numbers_of(run) == numbers_of(alone)
            if not right:
                print(ending.said)
        print(f"{times} dead, stopped or hanging processes: 0 jobs that never ended, {named} named; {went_on} of {tried} that were started "
              f"again gave the same bits; at most {longest:.1f} s more than an undisturbed run, with engine.timeout={TIMEOUT}")  # fmt: skip
    return 0 if named == times and went_on == tried else 1


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
