"""`prepare` in a process that kills itself: `python -m tests.support.prepare_job CONFIG.json [PATTERN COUNT]`.

It kills itself at the next result of a worker once COUNT files match the pattern.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from textmill.config import RunConfig
from textmill.corpus import find_sources, records
from textmill.corpus.prepare import prepare
from textmill.runners.on_local import ProcessRunner

ROOT = Path(__file__).resolve().parents[2]


def run_prepare(config: RunConfig, pattern: str = "", count: int = 0) -> int:
    """Run such a process; return its exit code."""
    Path("job.json").write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
    command = [sys.executable, "-m", "tests.support.prepare_job", "job.json", pattern, str(count)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


def main(config: str, pattern: str, count: str) -> None:
    """Run prepare, and maybe kill this process before the end."""
    real = ProcessRunner.map

    def killing(self: ProcessRunner, function: Any, shards: Iterable[Any]) -> Iterator[Any]:
        for result in real(self, function, shards):
            if pattern and len(list(Path().glob(pattern))) >= int(count):
                os.kill(os.getpid(), signal.SIGKILL)
            yield result

    find_sources.FILE_BYTES = records.CHUNK_BYTES  # a chunk for each file
    ProcessRunner.map = killing  # type: ignore[method-assign]
    prepare(RunConfig.model_validate_json(Path(config).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main(*sys.argv[1:])
