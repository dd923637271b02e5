"""The fixed prompts of a run, continued by each checkpoint it saves, so that progress can be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from textmill.checkpoints.folders import open_checkpoint
from textmill.config import RunConfig
from textmill.generation import sample_prompts
from textmill.track.jsonl import JsonLines
from textmill.training.runs import SAMPLES


def write_samples(config: RunConfig, folder: Path, step: int) -> Iterator[str]:
    """Continue `train.sample_prompts` with a checkpoint, into samples.jsonl; yields what to tell. A prompt that cannot be stops nothing."""
    with closing(JsonLines(folder.parent / SAMPLES)) as lines:
        try:
            for line in sample_prompts(
                open_checkpoint(folder), config.train.sample_prompts, config.sample, config.engine
            ):
                lines.log(step, line)
                yield f"step {step}: {line['prompt']}|{line['text'][:200]!r}"
        except Exception as error:
            yield f"step {step}: train.sample_prompts: {error}"
