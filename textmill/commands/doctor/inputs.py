"""Checks of what a project reads and writes to: sources, trackers, the runner."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

from textmill.commands.doctor.findings import ADVICE, BAD, GOOD, Finding
from textmill.commands.doctor.jobs import run_textmill
from textmill.config import RunConfig
from textmill.corpus.source import SELF_COMPRESSED
from textmill.corpus.sources import find_sources
from textmill.corpus.streams import BrokenStream, is_remote, read_head
from textmill.errors import TextmillError
from textmill.track import check_trackers

MAX_OPENED = 200
"""Files whose first bytes are read."""


def check_sources(config: RunConfig) -> Finding:
    """Whether the sources exist and can be read; MongoDB and remote files are contacted."""
    if not config.corpus.sources:
        return Finding("sources", ADVICE, "corpus.sources is empty", "name your files: corpus.sources=[FILE, ...]")
    skipped: list[str] = []
    opened = ""
    try:
        sources = find_sources(
            config.corpus.sources,
            skip=[Path(config.folder)],
            corpora=config.corpus.corpora_file,
            encoding=config.corpus.encoding,
            skipped=skipped,
        )
        local = [source for source in sources if source.format != "mongo" and not is_remote(source.address)]
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


def check_trackers_work(config: RunConfig) -> Finding:
    """Whether the packages of the trackers are there."""
    warning = io.StringIO()
    try:
        with redirect_stderr(warning):
            broken = check_trackers(config.track)
    except TextmillError as error:
        return Finding("trackers", BAD, str(error), "install it, or remove it from track.kinds")
    if broken:
        fix = f"install it again, or remove it from track.kinds: pip install --force-reinstall {' '.join(broken)}"
        return Finding("trackers", ADVICE, " ".join(warning.getvalue().split()), fix)
    return Finding("trackers", GOOD, ", ".join(["metrics.jsonl", *config.track.kinds]))


def check_runner(config: RunConfig, scratch: Path) -> Finding:
    """Whether the runner can do a small job: prepare a bundled text."""
    kind = config.runner.kind
    done = run_textmill(["prepare", "quickstart", f"folder={scratch / 'runner'}", f"runner.kind={kind}"])
    if done.returncode:
        return Finding("runner", BAD, f"{kind}: {done.last_line}", f"see docs/runners.md for runner.kind={kind}")
    return Finding("runner", GOOD, f"{kind}: prepared a small corpus")
