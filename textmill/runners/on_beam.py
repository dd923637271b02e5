"""Run shards as Apache Beam pipelines; the results come back through a shared folder."""

from __future__ import annotations

import difflib
import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from itertools import islice, pairwise
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from textmill.errors import TextmillError
from textmill.runners import Result, Shard
from textmill.runners.on_local import end_with_parent

if TYPE_CHECKING:
    from textmill.config import BeamRunner


def _is_needed(record: logging.LogRecord) -> bool:
    """Beam warns of packages for Google's BigQuery, in every process that imports it."""
    return not str(record.msg).startswith("apitools not found")


logging.getLogger().addFilter(_is_needed)  # Beam logs it there, not in a logger of its own
try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
    from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
except ImportError:
    raise TextmillError("runner.kind=beam needs apache-beam; run: pip install 'textmill[beam]'") from None
finally:
    logging.getLogger().removeFilter(_is_needed)


SHARDS_PER_PIPELINE = 10_000
"""Shards per pipeline: enough for any cluster, few enough for any number of shards."""
CODER = beam.coders.PickleCoder()
"""Beam's own pickling, for shards and for the result files."""
MAX_PIPELINES = 3
"""Pipelines started for the same shards when local workers die; a cluster has its own retries."""
GRACE_SECONDS = 10.0
"""Seconds to wait for a pipeline that lost a worker; Beam's direct runner would deadlock."""


def new_runner(config: BeamRunner) -> PipelineRunner:
    """The runner of `runner.kind: beam`."""
    _check_options(config.options)
    return PipelineRunner(tuple(config.options), config.shared_folder)


def _check_options(options: list[str]) -> None:
    """Refuse what Beam's own parser does not know, which Beam would ignore, and what its validator finds."""
    for before, word in pairwise(["", *options]):
        has_value = not before.startswith("--") or "=" in before
        if has_value and not word.startswith("-"):
            raise TextmillError(
                f"runner.options: found '{word}', which is no option; "
                "write --NAME=VALUE, such as --direct_running_mode=multi_processing"
            )
    usage = StringIO()
    try:
        with redirect_stderr(usage):
            parsed = PipelineOptions(options)
            engine = parsed.view_as(StandardOptions).runner or ""
            if "." in engine:  # a runner outside of Beam's list defines its options in its own module
                import_module(engine.rpartition(".")[0])
            known = parsed.get_all_options()
            unknown = sorted(set(parsed.get_all_options(retain_unknown_options=True)) - set(known))
    except SystemExit:
        reason = usage.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise TextmillError(f"runner.options: {reason}; correct it") from None
    except ImportError as error:
        raise TextmillError(f"runner.options: --runner={engine}: {error}; install what it needs") from None
    if unknown:
        near = difflib.get_close_matches(unknown[0], list(known), n=1)
        advice = f"did you mean --{near[0]}?" if near else "remove it"
        raise TextmillError(f"runner.options: Beam has no option --{unknown[0]}; {advice}")
    # Beam asks for the class of the runner, which exists only where its packages are installed.
    if problems := PipelineOptionsValidator(parsed, type(engine.rpartition(".")[2] or "None", (), {})()).validate():
        raise TextmillError(f"runner.options: {' '.join(problems)} Set what is missing for --runner={engine}")


@dataclass(frozen=True)
class PipelineRunner:
    """Maps over shards with one pipeline per SHARDS_PER_PIPELINE shards."""

    options: tuple[str, ...]
    folder: str | None = None

    def __enter__(self) -> Self:
        """Nothing is kept between pipelines: Beam's engine has its own workers."""
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Yield results in the order of the shards, after each pipeline is finished."""
        stream = iter(shards)
        while shard_batch := list(islice(stream, SHARDS_PER_PIPELINE)):
            yield from self._map_batch(function, shard_batch)

    def _map_batch(self, function: Callable[[Shard], Result], shards: list[Shard]) -> Iterator[Result]:
        folder = self._new_folder()
        try:
            failure = self._run(_ShardStep(function, str(folder)), shards)
            for number, shard in enumerate(shards):
                yield _read_outcome(folder, number, shard, failure)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        try:
            if self.folder:
                os.makedirs(self.folder, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="textmill-beam-", dir=self.folder)).resolve()
        except OSError as error:
            raise TextmillError(
                f"runner.shared_folder: {self.folder or tempfile.gettempdir()}: {error.strerror}; use another folder"
            ) from None

    def _run(self, step: _ShardStep, shards: list[Any]) -> str:
        """Run pipelines until every shard has a result or an error; return the failure message, or ''."""
        failure = ""
        for _ in range(MAX_PIPELINES):
            # Beam cannot encode every type, but it can encode bytes.
            pending = [
                (number, CODER.encode(shard))
                for number, shard in enumerate(shards)
                if not _has_outcome(step.folder, number)
            ]
            failure = _supervise(step, pending, list(self.options))
            if failure != WORKER_DIED or all(_has_outcome(step.folder, number) for number, _ in pending):
                break
        return failure


WORKER_DIED = "a worker died (killed, or out of memory?)"
DEAD_WORKER_FILE = "dead"
"""A file that reports a dead worker which left no file of its own."""


def _supervise(step: _ShardStep, pending: list[tuple[int, bytes]], options: list[str]) -> str:
    """Run one pipeline in a separate process, which can be killed when it waits for a dead worker."""
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run_pipeline, args=(step, pending, options, reader))
    failure = Path(step.folder) / "failure"
    process.start()
    try:
        lost_since = 0.0
        while process.is_alive():
            process.join(0.5)
            lost_since = (lost_since or time.monotonic()) if _has_lost_worker(step.folder, process) else 0.0
            if lost_since and time.monotonic() - lost_since > GRACE_SECONDS:
                return WORKER_DIED
        if failure.is_file():
            return failure.read_text(encoding="utf-8")
        return WORKER_DIED if process.exitcode else ""
    finally:
        writer.close()
        if process.is_alive():
            process.kill()
        process.join()
        reader.close()
        for path in Path(step.folder).glob("*.worker"):
            _kill_worker(path)
        failure.unlink(missing_ok=True)
        (Path(step.folder) / DEAD_WORKER_FILE).unlink(missing_ok=True)


def _run_pipeline(
    step: _ShardStep, pending: list[tuple[int, bytes]], options: list[str], reader: connection.Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    threading.Thread(target=end_with_parent, args=(reader,), daemon=True).start()
    threading.excepthook = partial(_record_worker_death, step.folder)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
            spread = pipeline | "shards" >> beam.Create(pending) | "spread" >> beam.Reshuffle()
            spread | "work" >> beam.ParDo(step)
    except Exception as error:
        (Path(step.folder) / "failure").write_text(_summarise_error(error), encoding="utf-8")


def _record_worker_death(folder: str, _: object) -> None:
    """Report a dead worker: Beam's thread for it fails, and the worker may have died before it wrote its file."""
    if os.path.isdir(folder):
        (Path(folder) / DEAD_WORKER_FILE).touch()


def _has_lost_worker(folder: str, process: BaseProcess) -> bool:
    """True if a local worker died: its process is gone but its file is still there, or Beam's thread reported it."""
    if (Path(folder) / DEAD_WORKER_FILE).exists():
        return True
    for path in Path(folder).glob("*.worker"):
        host, _, pid = path.stem.rpartition("-")
        if host == socket.gethostname() and int(pid) != process.pid and not _alive(int(pid)):
            return True
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _kill_worker(path: Path) -> None:
    """Kill a local worker that its pipeline left behind."""
    host, _, pid = path.stem.rpartition("-")
    path.unlink(missing_ok=True)
    if host == socket.gethostname() and _alive(int(pid)):
        os.kill(int(pid), signal.SIGKILL)


class _ShardStep(beam.DoFn):  # type: ignore[misc]
    """Processes one shard in a worker and writes the outcome to a file, atomically."""

    def __init__(self, function: Callable[[Any], Any], folder: str) -> None:
        super().__init__()
        self.function = function
        self.folder = folder

    def setup(self) -> None:
        """Write this worker's file: Beam does not notice when one of its own processes dies."""
        if os.path.isdir(self.folder):
            self._worker_file().touch()

    def teardown(self) -> None:
        """Remove this worker's file."""
        self._worker_file().unlink(missing_ok=True)

    def _worker_file(self) -> Path:
        return Path(self.folder) / f"{socket.gethostname()}-{os.getpid()}.worker"

    def process(self, numbered: tuple[int, bytes]) -> None:
        """Process a shard, unless an earlier attempt of Beam has finished it."""
        number, shard = numbered
        if _outcome_path(self.folder, number, "result").is_file():
            return
        try:
            result = self.function(CODER.decode(shard))
        except TextmillError as error:  # a user error: retrying does not help, and the caller reports it
            _write_outcome(self.folder, number, "error", error)
            return
        except Exception as error:
            _write_outcome(self.folder, number, "error", error)
            raise  # Beam may retry; the error of the last attempt counts
        _write_outcome(self.folder, number, "result", result)


def _outcome_path(folder: str | Path, number: int, kind: str) -> Path:
    return Path(folder) / f"{number:05d}.{kind}"


def _has_outcome(folder: str, number: int) -> bool:
    return _outcome_path(folder, number, "result").is_file() or _outcome_path(folder, number, "error").is_file()


def _write_outcome(folder: str, number: int, kind: str, outcome: Any) -> None:
    if not os.path.isdir(folder):
        raise OSError(
            f"runner.shared_folder: {folder} does not exist on this worker; use a folder that every worker can access"
        )
    temporary = Path(folder) / f"{number:05d}.tmp-{uuid4().hex}"
    temporary.write_bytes(CODER.encode(outcome))
    os.replace(temporary, _outcome_path(folder, number, kind))


def _read_outcome(folder: Path, number: int, shard: Any, failure: str) -> Any:
    """The result of a shard; raises the error of its function."""
    if (path := _outcome_path(folder, number, "result")).is_file():
        return CODER.decode(path.read_bytes())
    if (path := _outcome_path(folder, number, "error")).is_file():
        raise CODER.decode(path.read_bytes())
    if failure == WORKER_DIED:
        raise TextmillError(
            f"runner: {WORKER_DIED}, {MAX_PIPELINES} times; {shard!r} is not finished; "
            f"use a machine with more memory, or remove that input"
        )
    if failure:
        raise TextmillError(
            f"runner: the Beam pipeline failed: {failure}; fix that and run the command again: finished shards are kept"
        )
    raise TextmillError(
        f"runner: no result for {shard!r} in runner.shared_folder; use a folder that this machine and every worker "
        "can access"
    )


def _summarise_error(error: Exception) -> str:
    """The type and last line of an error; Beam's messages contain full tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500]}" if lines else type(error).__name__
