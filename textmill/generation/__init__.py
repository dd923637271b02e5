"""The generate command: continues a text, streamed to the terminal or as JSON lines."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import EngineConfig, RunConfig, SampleConfig
from textmill.errors import TextmillError, warn
from textmill.generation.prompts import Terminal, find_prompts, is_terminal
from textmill.models import find_run_model
from textmill.tokens.chat import ChatTemplate, open_template

if TYPE_CHECKING:
    from textmill.generation.generator import GeneratedText, Generator

BOLD = "\x1b[1m"
PLAIN = "\x1b[0m"
SEPARATOR = "-" * 40


def generate(config: RunConfig, step: StepChoice | None = None, as_json: bool = False) -> list[str]:
    """Continue `sample.prompt` `sample.count` times, or without a prompt every line that is typed or piped in.

    Returns the new texts.
    """
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    sample = config.sample
    has_prompts = as_json or sample.prompt is not None or sample.prompts_file is not None
    is_interactive = not has_prompts and is_terminal(sys.stdin) and is_terminal(sys.stdout)
    found = [] if is_interactive else find_prompts(sample)
    prompts = [prompt for prompt, _ in found]
    generator = open_generator(checkpoint, config.engine)
    for prompt, place in found:
        generator.check_prompt(prompt, sample, place)
    if as_json or sample.prompts_file is not None:
        texts = _print_json(generator, prompts, sample)
    elif prompts:
        texts = _print_samples(generator, prompts, sample)
    else:
        texts = _continue_lines(generator, sample, checkpoint)
    if not all(texts) and open_template(checkpoint.tokenizer) is not None:
        warn("the model was finetuned for chat and ended a text at once; to ask it something, use textmill chat")
    return texts


def sample_prompts(
    checkpoint: Checkpoint, prompts: list[str], sample: SampleConfig, engine: EngineConfig
) -> list[dict[str, Any]]:
    """Continue each prompt, or answer it with a chat model; the seed counts up.

    Each result has prompt, text, seed and the number of new tokens.
    """
    from textmill.generation.chat import answer_all, render_question
    from textmill.generation.generator import open_generator

    generator = open_generator(checkpoint, engine)
    template = open_template(checkpoint.tokenizer)
    if not isinstance(template, ChatTemplate):  # base models of others have a template of their tokenizer too
        return [asdict(result) for result in generator.samples(prompts, sample)]
    questions = [render_question(template, prompt) for prompt in prompts]
    return [asdict(result) for result in answer_all(generator, template, prompts, questions, sample)]


def _seeded(sample: SampleConfig, number: int) -> SampleConfig:
    """Return the settings of sample `number` of `sample.count`."""
    return sample.model_copy(update={"seed": sample.seed + number})


def _print_json(generator: Generator, prompts: list[str], sample: SampleConfig) -> list[str]:
    """Print one JSON line per sample, in the order of the prompts."""
    texts = []
    for result in _generate_in_order(generator, prompts, sample):
        print(json.dumps(asdict(result), ensure_ascii=False), flush=True)
        texts.append(result.text)
    return texts


def _generate_in_order(generator: Generator, prompts: list[str], sample: SampleConfig) -> Iterator[GeneratedText]:
    """Yield all samples, group by group. A group is large enough to keep the slots full most of the time."""
    size = max(8 * sample.batch // sample.count, 1)
    for begin in range(0, len(prompts), size):
        first = _seeded(sample, begin * sample.count)
        yield from generator.samples(prompts[begin : begin + size], first, sample.count)


def _print_samples(generator: Generator, prompts: list[str], sample: SampleConfig) -> list[str]:
    """Print each prompt and stream its continuations."""
    texts: list[str] = []
    for place, number in itertools.product(range(len(prompts)), range(sample.count)):
        prompt = prompts[place]
        chunks = generator.stream(prompt, _seeded(sample, place * sample.count), number)
        if texts:
            print(SEPARATOR)
        print(f"{BOLD}{prompt}{PLAIN}" if prompt and is_terminal(sys.stdout) else prompt, end="", flush=True)
        text = ""
        for chunk in chunks:
            text += chunk
            print(chunk, end="", flush=True)
        print("" if text.endswith("\n") else "\n", end="", flush=True)
        texts.append(text)
    return texts


def _continue_lines(generator: Generator, sample: SampleConfig, checkpoint: Checkpoint) -> list[str]:
    """Continue each line that is typed; after an error, report it and read the next line."""
    print(
        f"{checkpoint.folder}: type a text to continue; an empty line starts a new text; "
        f"ctrl-C stops a text, ctrl-D ends"
    )
    texts: list[str] = []
    with Terminal() as terminal:
        for prompt in terminal.lines():
            try:
                new = terminal.run_interruptible(partial(_print_samples, generator, [prompt], sample))
                if new is None:
                    print(" [stopped]", flush=True)
                texts += new or []
            except TextmillError as error:
                warn(str(error))
            # The same line typed again gives another text.
            sample = _seeded(sample, sample.count)
    return texts
