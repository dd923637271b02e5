"""Checks that run textmill itself on a tiny model: training, resuming, two processes, the compiler."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from textmill.commands.doctor.findings import ADVICE, BAD, GOOD, Finding
from textmill.track.jsonl import METRICS_FILE, read_metrics

TIMEOUT = 600
"""Seconds that a job may take; a machine that needs more has hung."""
TINY = [
    "tokenizer.vocab=300",
    "model.shape.layers=1",
    "model.shape.heads=2",
    "model.shape.width=16",
    "train.length=16",
    "train.batch=4",
    "train.warmup=0",
    "train.save_every=1",
    "train.log_every=1",
    "train.evaluate_every=1000",
    "engine.micro_batch=2",
]
STAGES = """
import sys
from textmill.cli import main
sys.exit(any(main([command, *sys.argv[1:]]) for command in ("prepare", "fit-tokenizer", "tokenize")))
"""
COMPILE = "import torch; print(torch.compile(lambda x: x.sin() + 1)(torch.zeros(4)).sum().item())"
KERNEL = """
import torch
from textmill.engines.losses_torch import LossFormula, WeightedLabels, summed_loss
from textmill.kernels.triton_support import missing_requirement
from textmill.storage import faults
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
values = torch.randn(64, 32), torch.randn(128, 32), torch.arange(64), torch.full((64,), 1 / 64)
faults.break_kernel()
losses = []
for place in ("cpu", device):
    x, head, labels, weights = (value.to(place) for value in values)
    losses.append(summed_loss(x, head, WeightedLabels(labels, weights), LossFormula(vocab=120)).item())
print(device, missing_requirement(), *losses, sep="|")
"""
"""The loss of random logits, by torch on the CPU and by our kernel on a GPU."""
MAX_KERNEL_DIFFERENCE = 1e-3
MAX_DIFFERENCE = 1e-5
"""Relative difference of losses between one and two processes."""


@dataclass(frozen=True)
class FinishedProcess:
    """How a process ended."""

    returncode: int
    output: str

    @property
    def last_line(self) -> str:
        """The last line that it printed: the error, if there was one."""
        return next((line for line in reversed(self.output.splitlines()) if line.strip()), "it printed nothing")


def run_textmill(arguments: list[str]) -> FinishedProcess:
    """Run a command of textmill in a process of its own: a crash of a driver or kernel must not end doctor."""
    return run_python(["-m", "textmill", *arguments])


def run_python(arguments: list[str]) -> FinishedProcess:
    """Run Python with these arguments."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return FinishedProcess(-1, f"did not end within {TIMEOUT} seconds")
    return FinishedProcess(done.returncode, done.stdout + done.stderr)


def train_arguments(scratch: Path, run: str, steps: int, *more: str) -> list[str]:
    """The command that trains a tiny model in the scratch folder."""
    return [
        "train",
        "quickstart",
        f"folder={scratch}",
        f"train.folder={scratch / run}",
        f"train.steps={steps}",
        *TINY,
        *more,
    ]


def check_training(scratch: Path, device: str) -> list[Finding]:
    """Prepare, tokenize, train two steps, save, and resume for a third: every part that a real run needs."""
    done = run_python(["-c", STAGES, "quickstart", f"folder={scratch}", "tokenizer.vocab=300"])
    if done.returncode:
        return [Finding("data", BAD, done.last_line, "the line names the cause; the same commands fail for a project")]
    device_setting = f"engine.device={device}"
    first = run_textmill(train_arguments(scratch, "one", 2, device_setting))
    if first.returncode:
        fix = "if it is a GPU: compare the driver with torch (nvidia-smi), or train with engine.device=cpu"
        return [Finding("training", BAD, f"two steps failed: {first.last_line}", fix)]
    losses = read_losses(scratch / "one")
    if not losses or not all(map(math.isfinite, losses)):
        fix = "the device computes wrong numbers: try engine.precision=fp32, then engine.device=cpu"
        return [Finding("training", BAD, f"losses are {losses}", fix)]
    where = next((line.split(" on ", 1)[1].split(";")[0] for line in first.output.splitlines() if " on " in line), "")
    found = [Finding("training", GOOD, f"two steps on {where}, loss {losses[-1]:.3f}")]
    second = run_textmill(train_arguments(scratch, "one", 3, device_setting))
    if second.returncode or "resumes from step 2" not in second.output:
        return [*found, Finding("resume", BAD, second.last_line, "check the disk: a checkpoint could not be read back")]
    return [*found, Finding("resume", GOOD, "saved, and resumed from step 2")]


def check_processes(scratch: Path) -> Finding:
    """Two processes on the CPU, which exchange gradients; they must give the losses of one."""
    if not (scratch / "tokens").is_dir():
        return Finding("two processes", ADVICE, "not checked, because the data job failed")
    one = run_textmill(train_arguments(scratch, "single", 2, "engine.device=cpu"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "textmill"]
    two = run_python([*launcher, *train_arguments(scratch, "both", 2, "engine.device=cpu")])
    if one.returncode or two.returncode:
        fix = "check that processes may connect to localhost (firewall, proxy variables, /etc/hosts)"
        failed = two if two.returncode else one
        return Finding("two processes", BAD, failed.last_line, fix)
    pairs = list(zip(read_losses(scratch / "single"), read_losses(scratch / "both"), strict=False))
    worst = max((abs(a - b) / abs(a) for a, b in pairs), default=math.inf)
    if worst > MAX_DIFFERENCE:
        return Finding(
            "two processes", BAD, f"their losses differ from one process by {worst:.1e}", "run: textmill verify"
        )
    return Finding("two processes", GOOD, f"exchanged gradients over gloo, losses within {worst:.0e} of one process")


def check_kernel() -> Finding:
    """One of our kernels on the GPU, compared with torch on the CPU."""
    done = run_python(["-c", KERNEL])
    parts = done.last_line.split("|")
    if done.returncode or len(parts) != 4:
        fix = "compare the driver with torch's CUDA (nvidia-smi), or train with engine.device=cpu"
        return Finding("kernel", BAD, f"one of textmill's kernels failed: {done.last_line}", fix)
    device, missing, expected, found = parts
    if not abs(float(found) - float(expected)) <= MAX_KERNEL_DIFFERENCE * abs(float(expected)):  # or not a number
        fix = "the GPU computes wrong numbers: update its driver, or use another GPU (CUDA_VISIBLE_DEVICES)"
        return Finding("kernel", BAD, f"a loss is {found} on the GPU and {expected} on the CPU", fix)
    if device == "cpu":
        return Finding("kernel", GOOD, "no GPU was found, so torch's own operations are used")
    if missing:
        return Finding("kernel", ADVICE, f"slower fallbacks are used: no {missing}", f"install it: {missing}")
    return Finding("kernel", GOOD, "one of textmill's kernels gives torch's numbers")


def check_compile() -> Finding:
    """Whether torch can compile; without a compiler, training falls back to slower code."""
    done = run_python(["-c", COMPILE])
    if done.returncode == 0 and done.output.split()[-1:] == ["4.0"]:
        return Finding("compiler", GOOD, "torch.compile works")
    fix = "install a C++ compiler (Debian: g++ python3-dev), or leave engine.compile=auto, which falls back"
    return Finding("compiler", ADVICE, f"torch.compile failed: {done.last_line}", fix)


def read_losses(run: Path) -> list[float]:
    """The logged losses of a run; NaN where none was finite."""
    lines = read_metrics(run / METRICS_FILE)
    return [math.nan if line["loss"] is None else float(line["loss"]) for line in lines if "loss" in line]
