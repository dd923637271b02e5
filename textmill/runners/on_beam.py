"""Apache Beam: shards go to any engine that Beam drives, and their results come back through a folder that all reach."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any
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


def new_runner(config: BeamRunner) -> PipelineRunner:
    """The runner of `runner.kind: beam`."""
    return PipelineRunner(tuple(config.options), config.folder)


@dataclass(frozen=True)
class PipelineRunner:
    """Maps over shards with one pipeline for every WAVE of them."""

    options: tuple[str, ...]
    folder: str | None = None

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
            if failure:
                raise TextmillError(f"runner: Beam's pipeline failed after all shards were through: {failure}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _new_folder(self) -> Path:
        try:
            if self.folder:
                os.makedirs(self.folder, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="textmill-beam-", dir=self.folder)).resolve()
        except OSError as error:
            raise TextmillError(f"runner.folder: {self.folder or tempfile.gettempdir()}: {error.strerror}; name another") from None

    def _run(self, step: _Step, shards: list[Any]) -> str:
        """Run the pipeline to its end; what went wrong with it, or nothing."""
        # Beam cannot encode every type; bytes it can.
        numbered = [(number, CODER.encode(shard)) for number, shard in enumerate(shards)]
        try:
            with beam.Pipeline(options=PipelineOptions(list(self.options))) as pipeline:
                spread = pipeline | "shards" >> beam.Create(numbered) | "spread" >> beam.Reshuffle()
                spread | "work" >> beam.ParDo(step)
        except Exception as error:
            return _short(error)
        return ""


class _Step(beam.DoFn):  # type: ignore[misc]
    """One shard in a worker: its outcome goes to a file that appears whole or not at all."""

    def __init__(self, function: Callable[[Any], Any], folder: str) -> None:
        super().__init__()
        self.function, self.folder = function, folder

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
    if failure:
        raise TextmillError(f"runner: Beam's pipeline failed: {failure}; mend that and run it again: what is finished is kept")
    raise TextmillError(f"runner: no result of {shard!r} in runner.folder; name a folder that this machine and every worker reach")


def _short(error: Exception) -> str:
    """The last line of an error: Beam's messages carry whole tracebacks."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:500]}" if lines else type(error).__name__
