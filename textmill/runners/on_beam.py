"""Apache Beam: shards go to any engine that Beam drives, and their results come back through a folder that all reach."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import connection, current_process, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from textmill.errors import TextmillError
from textmill.runners import Result, Shard

try:
    import apache_beam as beam
    from apache_beam.options.pipeline_options import PipelineOptions
except ImportError:
    raise TextmillError("runner.kind=beam needs apache-beam; run: pip install 'textmill[beam]'") from None

if TYPE_CHECKING:
    from textmill.config import BeamRunner

WAVE = 10_000
"""Shards of one pipeline: enough for any cluster, few enough that endless shards can be mapped."""
CODER = beam.coders.PickleCoder()
"""How Beam itself carries shards to a worker; results take the same form, in files that only one map ever sees."""
TRIES = 3
"""Pipelines for the shards of a wave when workers of this machine die under them; a cluster has its own rule."""
GRACE = 10.0
"""Seconds in which a pipeline that lost a worker may end by itself; Beam's direct runner would wait for ever."""


def new_runner(config: BeamRunner) -> PipelineRunner:
    """The runner of `runner.kind: beam`."""
    if getattr(current_process(), "_inheriting", False):
        raise TextmillError(
            "started by a worker that was importing your script; put the call under: if __name__ == '__main__':"
        )
    return PipelineRunner(tuple(config.options), config.folder)


@dataclass(frozen=True)
class PipelineRunner:
    """Maps over shards with one pipeline for every WAVE of them."""

    options: tuple[str, ...]
    folder: str | None = None

    def __enter__(self) -> Self:
        """Nothing is kept from one pipeline to the next: the engine behind Beam has its own workers."""
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, function: Callable[[Shard], Result], shards: Iterable[Shard]) -> Iterator[Result]:
        """Results in the order of the shards; they come when a whole wave is through."""
        stream = iter(shards)
        while wave := list(islice(stream, WAVE)):
            yield from self._map_wave(function, wave)

    def _map_wave(self, function: Callable[[Shard], Result], shards: list[Shard]) -> Iterator[Result]:
        folder = self._new_folder()
        try:
            failure = self._run(_Step(function, str(folder)), shards)
            for number, shard in enumerate(shards):
                yield _outcome_of(folder, number, shard, failure)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        try:
            if self.folder:
                os.makedirs(self.folder, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="textmill-beam-", dir=self.folder)).resolve()
        except OSError as error:
            raise TextmillError(
                f"runner.folder: {self.folder or tempfile.gettempdir()}: {error.strerror}; name another"
            ) from None

    def _run(self, step: _Step, shards: list[Any]) -> str:
        """Run pipelines until every shard has its outcome; what went wrong, or nothing."""
        failure = ""
        for _ in range(TRIES):
            # Beam cannot encode every type; bytes it can.
            todo = [
                (number, CODER.encode(shard)) for number, shard in enumerate(shards) if not _done(step.folder, number)
            ]
            failure = _supervise(step, todo, list(self.options))
            if failure != DIED or all(_done(step.folder, number) for number, _ in todo):
                break
        return failure


DIED = "a worker died (killed, or out of memory?)"
DEAD = "dead"
"""The file that says so when the worker itself left no trace."""


def _supervise(step: _Step, todo: list[tuple[int, bytes]], options: list[str]) -> str:
    """One pipeline in a process of its own, which can be ended when it waits for a worker that is dead."""
    context = get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run_pipeline, args=(step, todo, options, reader))
    failure = Path(step.folder) / "failure"
    process.start()
    try:
        lost_at = 0.0
        while process.is_alive():
            process.join(0.5)
            lost_at = (lost_at or time.monotonic()) if _lost(step.folder, process) else 0.0
            if lost_at and time.monotonic() - lost_at > GRACE:
                return DIED
        if failure.is_file():
            return failure.read_text(encoding="utf-8")
        return DIED if process.exitcode else ""
    finally:
        writer.close()
        if process.is_alive():
            process.kill()
        process.join()
        reader.close()
        for path in Path(step.folder).glob("*.worker"):
            _end(path)
        failure.unlink(missing_ok=True)
        (Path(step.folder) / DEAD).unlink(missing_ok=True)


def _run_pipeline(
    step: _Step, todo: list[tuple[int, bytes]], options: list[str], reader: connection.Connection
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent alone decides what Ctrl-C means
    threading.Thread(target=_end_with_parent, args=(reader,), daemon=True).start()
    threading.excepthook = partial(_note_death, step.folder)
    logging.getLogger().setLevel(logging.ERROR)
    try:
        with beam.Pipeline(options=PipelineOptions(options)) as pipeline:
            spread = pipeline | "shards" >> beam.Create(todo) | "spread" >> beam.Reshuffle()
            spread | "work" >> beam.ParDo(step)
    except Exception as error:
        (Path(step.folder) / "failure").write_text(_short(error), encoding="utf-8")


def _note_death(folder: str, _: object) -> None:
    """Beam's thread that waits for a worker ends in an error when the worker dies; it may have died before it could say that it lives."""
    if os.path.isdir(folder):
        (Path(folder) / DEAD).touch()


def _end_with_parent(reader: connection.Connection) -> None:
    connection.wait([reader])  # nothing is ever sent: it wakes when the other end is closed
    os._exit(1)


def _lost(folder: str, process: BaseProcess) -> bool:
    """Whether a worker of this machine is gone that did not say goodbye, or never came so far as to say that it lives."""
    if (Path(folder) / DEAD).exists():
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


def _end(path: Path) -> None:
    """End a worker of this machine that its pipeline left behind."""
    host, _, pid = path.stem.rpartition("-")
    path.unlink(missing_ok=True)
    if host == socket.gethostname() and _alive(int(pid)):
        os.kill(int(pid), signal.SIGKILL)


class _Step(beam.DoFn):  # type: ignore[misc]
    """One shard in a worker: its outcome goes to a file that appears whole or not at all."""

    def __init__(self, function: Callable[[Any], Any], folder: str) -> None:
        super().__init__()
        self.function, self.folder = function, folder

    def setup(self) -> None:
        """Say that this worker lives: Beam does not notice when one of its own processes dies."""
        if os.path.isdir(self.folder):
            self._mark().touch()

    def teardown(self) -> None:
        """Say goodbye."""
        self._mark().unlink(missing_ok=True)

    def _mark(self) -> Path:
        return Path(self.folder) / f"{socket.gethostname()}-{os.getpid()}.worker"

    def process(self, numbered: tuple[int, bytes]) -> None:
        """Do the shard, unless a bundle that Beam tries again has done it before."""
        number, shard = numbered
        if _place(self.folder, number, "result").is_file():
            return
        try:
            result = self.function(CODER.decode(shard))
        except TextmillError as error:  # the user's mistake: trying again mends nothing, and the caller tells of it
            _keep(self.folder, number, "error", error)
            return
        except Exception as error:
            _keep(self.folder, number, "error", error)
            raise  # Beam may try it again; what the last try says counts
        _keep(self.folder, number, "result", result)


def _place(folder: str | Path, number: int, kind: str) -> Path:
    return Path(folder) / f"{number:05d}.{kind}"


def _done(folder: str, number: int) -> bool:
    return _place(folder, number, "result").is_file() or _place(folder, number, "error").is_file()


def _keep(folder: str, number: int, kind: str, outcome: Any) -> None:
    if not os.path.isdir(folder):
        raise OSError(f"runner.folder: {folder} is not there on this worker; name one that every worker reaches")
    temporary = Path(folder) / f"{number:05d}.tmp-{uuid4().hex}"
    temporary.write_bytes(CODER.encode(outcome))
    os.replace(temporary, _place(folder, number, kind))


def _outcome_of(folder: Path, number: int, shard: Any, failure: str) -> Any:
    """The result of a shard; an error of its function is raised as it was."""
    if (path := _place(folder, number, "result")).is_file():
        return CODER.decode(path.read_bytes())
    if (path := _place(folder, number, "error")).is_file():
        raise CODER.decode(path.read_bytes())
    if failure == DIED:
        raise TextmillError(
            f"runner: {DIED}, {TRIES} times; {shard!r} was not done; give the machine more memory, or take that input out"
        )
    if failure:
        raise TextmillError(
            f"runner: Beam's pipeline failed: {failure}; mend that and run it again: what is finished is kept"
        )
    raise TextmillError(
        f"runner: no result of {shard!r} in runner.folder; name a folder that this machine and every worker reach"
    )


def _short(error: Exception) -> str:
    """The last line of an error: Beam's messages carry whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500]}" if lines else type(error).__name__
