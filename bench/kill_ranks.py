"""Kill, stop or hang one rank at random steps; check that the job ends, names the right rank, and resumes.

python bench/kill_ranks.py [times] [seed]
python bench/kill_ranks.py nodes [times] [seed]

nodes: a job on four nodes, each a torchrun of its own on this machine; one is killed, and the others must end the run
with the losses of a run that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.kill_train import prepare_tokens, read_metrics, textmill, train_arguments
from textmill.verification.launcher import free_port

STEPS, TIMEOUT = 12, 4
KINDS = {"kill": "no heartbeat", "stop": "no heartbeat", "hang": "the other ranks wait for"}
"""The fault of a rank, and how the other ranks report it."""
NODES, NODE_STEPS, NODE_TIMEOUT = 4, 100, 20
"""Of the job of which a node is killed; another timeout, since all processes share the cores."""
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


def node_arguments(root: Path, run: Path) -> list[str]:
    """Return the command-line arguments of a job that a node can be taken from."""
    more = ["train.batch=12", "train.save_every=10", "train.evaluate_every=1000", f"engine.timeout={NODE_TIMEOUT}"]
    return [*train_arguments(root, run, NODE_STEPS), *more]


def run_nodes(arguments: list[str], metrics: Path, *, nodes: int, lost: int, after: int) -> list[Ending]:
    """Run a job on several nodes and kill node `lost` after `after` logged steps; return the endings of the others."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{nodes}", "--nproc-per-node", "1"),
        *("--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    ]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    started, processes, outputs = time.monotonic(), [], [tempfile.TemporaryFile("w+") for _ in range(nodes)]
    for node, output in enumerate(outputs):
        words = [*command, "--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=5", "-m", "textmill", *arguments]
        processes.append(subprocess.Popen(words, env=environment, stdout=output, stderr=output))
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < after:
            assert time.monotonic() - started < LONGEST
            time.sleep(0.02)
        agent = processes.pop(lost)
        for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)
        agent.kill()
        agent.wait()
        outputs.pop(lost).close()
        codes = [process.wait(LONGEST) for process in processes]
        endings = []
        for code, output in zip(codes, outputs, strict=True):
            output.seek(0)
            endings.append(Ending(code, time.monotonic() - started, output.read()))
        return endings
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for output in outputs:
            output.close()


def main_nodes(times: int = 20, seed: int = 1) -> int:
    """Run the campaign of lost nodes."""
    dice, right = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as folder:
        root, undisturbed = Path(folder), Path(folder) / "undisturbed"
        prepare_tokens(root)
        assert textmill(*node_arguments(root, undisturbed)).returncode == 0
        wanted = {row["step"]: row["loss"] for row in read_metrics(undisturbed) if "loss" in row}
        for number in range(times):
            run, lost, after = root / f"run-{number}", dice.randrange(1, NODES), dice.randrange(1, NODE_STEPS // 2)
            endings = run_nodes(node_arguments(root, run), run / "metrics.jsonl", nodes=NODES, lost=lost, after=after)
            found = {row["step"]: row["loss"] for row in read_metrics(run) if "loss" in row}
            largest = max((abs(found[step] / loss - 1) for step, loss in wanted.items() if step in found), default=1.0)
            went_on = [re.search(r"on (\d) processes[^\n]*resumes from step (\d+)", one.output) for one in endings]
            notes = [f"{one[1]} processes from step {one[2]}" for one in went_on if one]
            is_right = all(one.code == 0 for one in endings) and found.keys() == wanted.keys() and largest < 1e-5
            right += is_right
            print(
                f"node {lost} killed after step {after}: {notes}, {max(one.seconds for one in endings):.0f} s, losses "
                f"{largest:.1e} different, right: {is_right}",
                flush=True,
            )
            if not is_right:
                print(*(one.output[-3000:] for one in endings), sep="\n")
    print(f"{right} of {times} jobs ended with the losses of the undisturbed run")
    return 0 if right == times else 1


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
    numbers = [int(word) for word in sys.argv[1:] if word != "nodes"]
    sys.exit(main_nodes(*numbers) if "nodes" in sys.argv else main(*numbers))
