"""What `import textmill` has besides the commands: `open` a run or a model, `open_training` for a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.commands.evaluate import evaluate
from textmill.config import RunConfig
from textmill.devices import open_device
from textmill.errors import TextmillError
from textmill.generation import generate
from textmill.models import find_run_model
from textmill.models.base_torch import BaseNet
from textmill.models.nets_torch import open_net
from textmill.processes.ranks import SINGLE_PROCESS
from textmill.reports.curves import Curves
from textmill.reports.run_files import find_run, read_run
from textmill.reports.texts import draw_losses
from textmill.storage.stages import Force
from textmill.tokens.batches.batch import Batch
from textmill.tokens.vocabulary.tokenizer import TextTokenizer, open_tokenizer
from textmill.training import loop
from textmill.training.generations import split_generations
from textmill.where import Settings, open_config, open_where


class Run:
    """A run, a checkpoint or a model folder, opened to be read."""

    def __init__(self, where: str | Path, settings: Mapping[str, Any], step: StepChoice | None) -> None:
        opened = open_where(str(where), settings)
        self.config = opened.config
        self.where = str(where)
        self.settings = dict(settings)
        self.step = opened.step if step is None else step

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The folder of the model, by default the best one, and its step."""
        return find_run_model(self.config, self.step)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """`encode(text)` -> ids, `decode(ids)` -> text."""
        return open_tokenizer(self.checkpoint.folder)

    def net(self) -> BaseNet:
        """A torch module with the weights in fp32: `net(ids)` are hidden states, `net.logits(hidden)` their logits; the
        same one each time."""
        return self._net

    @cached_property
    def _net(self) -> BaseNet:
        return open_net(self.checkpoint.folder, open_device(self.config.engine.device))

    def capture(self, name: str) -> AbstractContextManager[list[Any]]:
        """The outputs of a module of `net()`, such as "h.0.attn", from the passes inside the `with` block."""
        return loop.capture_outputs(self.net(), name)

    def curves(self) -> Curves:
        """The loss curves of the run: a picture in a notebook, text elsewhere."""
        return draw_losses([read_run(find_run(self.where))])

    def batch(self, step: int) -> Batch:
        """The whole batch of a training step, counted from 1, in numpy."""
        config = loop.complete_config(split_generations(self.config)[-1], "no", SINGLE_PROCESS)
        _, _, batches, _ = loop.prepare_run(config, "no", "latest")
        return batches.batch_at(step - 1)

    def evaluate(self, **settings: Any) -> dict[str, Any]:
        """The metrics; `settings` are those of `evaluate`, such as tasks=["lambada"]."""
        return evaluate(self._with("evaluate", settings), step=self.step)

    def generate(self, prompt: str, **settings: Any) -> list[str]:
        """Continuations of a prompt; `settings` are those of `sample`, such as temperature=0.0."""
        return generate(self._with("sample", {"prompt": prompt, **settings}), step=self.step)

    def _with(self, section: str, settings: dict[str, Any]) -> RunConfig:
        return open_config(
            self.where, {**self.settings, **{f"{section}.{key}": value for key, value in settings.items()}}
        )


def open(where: str | Path, settings: Mapping[str, Any] | None = None, step: StepChoice | None = None) -> Run:
    """Open a run, a checkpoint or a model folder."""
    return Run(where, settings or {}, step)


def open_training(
    where: RunConfig | str | Path,
    settings: Settings = (),
    *,
    force: Force = "no",
    step: StepChoice = "latest",
    change: bool = False,
) -> AbstractContextManager[loop.Training | loop.DoneTraining]:
    """A run whose steps the caller computes: what the command `train` iterates over."""
    config = open_config(where, settings)
    if config.train.generations > 1:
        raise TextmillError(
            "train.generations: a loop of your own trains one of them; set it to 1, and for the next one "
            "train.distil.teachers=[RUN]"
        )
    return loop.open_training(config, force, step, change=change)
