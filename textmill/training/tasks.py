"""The tasks of `train.tasks`: measured during training on a copy of the weights, by all processes together."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

from textmill.checkpoints.adapters import read_base
from textmill.checkpoints.folders import Checkpoint
from textmill.config import RunConfig
from textmill.engines import Engine
from textmill.errors import TextmillError
from textmill.evaluation.task import Scorer, list_metrics
from textmill.evaluation.tasks import open_tasks
from textmill.processes.ranks import run_on_all
from textmill.storage.hub import find_model_folder
from textmill.storage.tensor_files import Named
from textmill.tokens.vocabulary.tokenizer import TextTokenizer
from textmill.training.start import Start

CHECKED_EXAMPLES = 2
"""Examples of each task that are measured before the first step, to find mistakes then."""


class TrainingTasks:
    """The tasks of a run. The engine's weights are copied into a net of their own, which is freed after the tasks."""

    def __init__(self, config: RunConfig, start: Start, tokenizer: TextTokenizer, engine: Engine) -> None:
        self.config = config
        self.start = start
        self.tokenizer = tokenizer
        self.engine = engine
        self.tasks = open_tasks(config.train.tasks)
        if self.tasks:
            from textmill.engines.scoring_torch import ScoringMesh

            self.mesh = ScoringMesh(config.engine, engine.ranks, in_training=True)

    def check(self) -> None:
        """Measure a few examples, so that mistakes are found before the first step."""
        metric = self.config.train.best.metric
        values = self._measure(self.start.step, CHECKED_EXAMPLES) if self.tasks else {}
        measured = [name for name in values if not name.endswith("/seconds")]
        if "/" in metric and metric not in measured:
            raise TextmillError(
                f"train.best.metric: '{metric}' is not measured; "
                + (f"train.tasks measures {', '.join(measured)}" if measured else "set train.tasks")
            )

    def measure(self, done: int) -> dict[str, float]:
        """The metrics of all tasks after `done` steps, and the seconds of each; the same on all ranks."""
        if not self.tasks:
            return {}
        return self._measure(done, self.config.train.tasks_sample)

    def _measure(self, done: int, sample: int | None) -> dict[str, float]:
        changes = {"sample": sample, "baselines": False, "tasks": self.config.train.tasks}
        evaluate = self.config.evaluate.model_copy(update=changes)
        config = self.config.model_copy(update={"evaluate": evaluate})

        def run() -> dict[str, float]:
            # Progress bars would tear the console's line, and weights may well look untrained at the start.
            with redirect_stderr(io.StringIO()):
                scorer = self._open_scorer(done)
                metrics: dict[str, float] = {}
                for task in self.tasks:
                    start = time.perf_counter()
                    task_metrics = list_metrics(task.measure(scorer, config))  # such as "lambada/accuracy"
                    label = next(iter(task_metrics)).partition("/")[0]
                    metrics |= task_metrics
                    metrics[f"{label}/seconds"] = time.perf_counter() - start
            return metrics

        metrics = run_on_all(self.engine.ranks, run)
        shared: dict[str, float] = self.engine.ranks.all_gather(metrics)[0]
        return shared

    def _open_scorer(self, done: int) -> Scorer:
        from textmill.evaluation.scorer_torch import new_scorer
        from textmill.evaluation.task import Share

        folder = self.config.folder_of("train") / f"step-{done:07d}"
        shape = self.start.shape
        net = self.mesh.new_net(shape, self._weights(), str(folder), self.config.model.lora)
        share = Share(self.engine.ranks, *self.mesh.part)
        return new_scorer(Checkpoint(folder, done, {}), net, self.tokenizer, self.config, share)

    def _weights(self) -> Iterator[Named]:
        """The weights as they are now; with LoRA those of the base, then the adapters."""
        if self.start.base is not None:
            yield from read_base(Path(find_model_folder(self.start.base)), dict(self.start.changed_weights))
        yield from self.engine.weights()
