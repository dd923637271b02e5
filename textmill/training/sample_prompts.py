"""Continue the fixed prompts of `train.sample_prompts` with each saved checkpoint, to show progress as text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from textmill.checkpoints.folders import open_checkpoint
from textmill.config import RunConfig
from textmill.generation import sample_prompts
from textmill.track.jsonl import JsonLines
from textmill.training.run_folder import SAMPLES_FILE


def write_samples(config: RunConfig, folder: Path, step: int) -> Iterator[str]:
    """Append the continuations to samples.jsonl and yield lines for the console; an error does not stop training."""
    with closing(JsonLines(folder.parent / SAMPLES_FILE)) as lines:
        try:
            for line in sample_prompts(
                open_checkpoint(folder), config.train.sample_prompts, config.sample, config.engine
            ):
                lines.log(step, line)
                yield f"step {step}: {line['prompt']}|{line['text'][:200]!r}"
        except Exception as error:
            yield f"step {step}: train.sample_prompts: {error}"
