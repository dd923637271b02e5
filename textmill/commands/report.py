"""The commands report, compare, watch and runs: what happened in one or several runs, from their files alone."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from textmill.errors import TextmillError
from textmill.reports.comparison import compare_runs, unique_names
from textmill.reports.page import build_page
from textmill.reports.run_files import find_run, list_runs, read_run
from textmill.reports.texts import describe_comparison, describe_curves, describe_run, describe_runs, draw_losses
from textmill.storage.files import format_path, write_text

REFRESH_SECONDS = 2.0
CLEAR = "\x1b[H\x1b[2J"


def report(runs: list[str], out: str | None = None, svg: str | None = None) -> Path:
    """Write one HTML file about the runs, or with `svg` their loss curves; return its path."""
    if not runs:
        raise TextmillError("report: no run given; write: textmill report RUN ...")
    read = [read_run(find_run(where)) for where in runs]
    path = Path(svg or out or read[0].folder / "report.html")
    if not path.parent.is_dir():
        raise TextmillError(f"{path}: there is no folder {path.parent}; create it, or name another file")
    write_text(path, draw_losses(read).svg if svg else build_page(read))
    print(f"report: {format_path(path)}: {path.stat().st_size / 1e3:,.0f} kB, {', '.join(unique_names(read))}")
    return path


def compare(runs: list[str], as_json: bool = False) -> dict[str, Any]:
    """Show what runs reached, in which settings they differ, and whether that is more than chance."""
    read = [read_run(folder) for folder in dict.fromkeys(find_run(where).resolve() for where in runs)]
    if len(read) < 2:
        raise TextmillError("compare: needs two runs or more; write: textmill compare RUN RUN ...")
    found = compare_runs(read)
    if as_json:
        print(json.dumps(asdict(found), ensure_ascii=False))
    else:
        print("\n".join([*describe_comparison(found), *describe_curves(read), "", *found.findings]))
    return asdict(found)


def watch(where: str) -> None:
    """Print the state and curves of a run, and again whenever its files change; without a terminal, once."""
    folder = find_run(where)
    if not sys.stdout.isatty():
        print("\n".join(describe_run(read_run(folder))))
        return
    with suppress(KeyboardInterrupt):
        _refresh(where)


def _refresh(where: str) -> None:
    before = ""
    while True:
        lines = "\n".join(describe_run(read_run(find_run(where))))  # another run if a generation has ended
        if lines != before:
            print(f"{CLEAR}{lines}\n\nrefreshed when the run logs; Ctrl-C ends", flush=True)
        before = lines
        time.sleep(REFRESH_SECONDS)


def runs(folder: str) -> None:
    """List all runs below a folder with their best figures."""
    found = [read_run(path) for path in list_runs(Path(folder))]
    if not found:
        raise TextmillError(f"{folder}: no run below this folder; a run has run.yaml and metrics.jsonl")
    print("\n".join(describe_runs(found, Path(folder))))
