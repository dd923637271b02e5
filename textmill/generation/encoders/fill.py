"""The fill command: the most likely tokens for each mask of a text, for people to read or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.errors import TextmillError, warn
from textmill.generation.prompts import find_prompts
from textmill.generation.terminal import Terminal, is_terminal
from textmill.models import find_run_model

if TYPE_CHECKING:
    from textmill.generation.encoders.filler_torch import Filled, Filler


def fill(config: RunConfig, step: StepChoice | None = None, as_json: bool = False) -> list[str]:
    """Fill the masks of `sample.prompt`, or without a prompt of every line that is typed or piped in.

    Returns the texts with the most likely token in each mask; `sample.top_k` is how many are shown.
    """
    from textmill.generation.encoders.filler_torch import open_filler  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    sample = config.sample
    given = as_json or sample.prompt is not None or sample.prompts_file is not None
    typed = not given and is_terminal(sys.stdin) and is_terminal(sys.stdout)
    prompts = [] if typed else find_prompts(sample)
    filler = open_filler(checkpoint, config.engine, sample.top_k)
    if typed:
        print(f"{checkpoint.folder}: type a text with {filler.mask}; ctrl-D ends")
        return list(_fill_lines(filler))
    for prompt in prompts:
        filler.texts.check(prompt)
    return [_print(one, as_json) for one in filler.fill(prompts)]


def _fill_lines(filler: Filler) -> Iterator[str]:
    """Fill each line that is typed; after an error, report it and read the next line."""
    with Terminal() as terminal:
        for prompt in terminal.lines():
            try:
                for one in terminal.run_interruptible(partial(_fill_line, filler, prompt)) or ():
                    yield _print(one, as_json=False)
            except TextmillError as error:
                warn(str(error))


def _fill_line(filler: Filler, prompt: str) -> list[Filled]:
    filler.texts.check(prompt)
    return list(filler.fill([prompt]))


def _print(filled: Filled, as_json: bool) -> str:
    if as_json:
        print(json.dumps(asdict(filled), ensure_ascii=False), flush=True)
        return filled.text
    print(filled.text)
    for choices in filled.masks:
        print("  " + ", ".join(f"{one.token} {100 * one.probability:.1f}%" for one in choices), flush=True)
    return filled.text
