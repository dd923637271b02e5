"""Checks of the machine: folders, disk, memory, limits, clock."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from textmill.commands.doctor.findings import ADVICE, BAD, GOOD, Finding
from textmill.storage.files import write_text

MIN_DISK = 1 << 30
LOW_DISK = 10 << 30
MIN_MEMORY = 2 << 30
MIN_SHARED_MEMORY = 64 << 20
"""Two processes of torch exchange small tensors through it."""
MIN_FILES = 1024
MAX_SKEW = 5.0
"""Seconds by which the clock of the file system may differ from that of the machine."""
OLDEST = 1_735_689_600
"""2025-01-01 in seconds since 1970: a clock before that was never set."""


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


def check_clock(folder: Path) -> Finding:
    """Whether the clock is set, and whether the file system agrees with it."""
    write_text(folder / "clock", "")
    now = time.time()
    written = (folder / "clock").stat().st_mtime
    if now < OLDEST:
        return Finding("clock", BAD, f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}", "set the clock (NTP)")
    if abs(now - written) > MAX_SKEW:
        found = f"the file system's clock is {written - now:+,.0f} seconds off"
        fix = "set both clocks (NTP): make and token checks compare times of files"
        return Finding("clock", ADVICE, found, fix)
    return Finding("clock", GOOD, f"{time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}")
