"""The generate command: continues a text, streamed to the terminal or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import EngineConfig, RunConfig, SampleConfig
from textmill.errors import TextmillError, warn
from textmill.generation.terminal import Terminal
from textmill.models import find_run_model
from textmill.tokens.chat_template import open_template

if TYPE_CHECKING:
    from textmill.generation.generator import Generator, Sample

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
SEPARATOR = "-" * 40


def generate(config: RunConfig, step: StepChoice = "latest", as_json: bool = False) -> list[str]:
    """Continue `sample.prompt` `sample.count` times, or without a prompt every line typed on a terminal.

    Returns the new texts.
    """
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    sample = config.sample
    prompts = [sample.prompt or ""] if sample.prompts_file is None else _read_prompts(Path(sample.prompts_file), sample)
    generator = open_generator(checkpoint, config.engine)
    if as_json or sample.prompts_file is not None:
        return _print_json(generator, prompts, sample)
    if sample.prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        return _continue_lines(generator, sample, checkpoint)
    return _print_samples(generator, sample.prompt or "", sample)


def sample_prompts(
    checkpoint: Checkpoint, prompts: list[str], sample: SampleConfig, engine: EngineConfig
) -> list[dict[str, Any]]:
    """Continue each prompt, or answer it with a chat model; the seed counts up.

    Each result has prompt, text, seed and the number of new tokens.
    """
    from textmill.generation.chat_answers import answer_all, render_question
    from textmill.generation.generator import open_generator

    generator, template = open_generator(checkpoint, engine), open_template(checkpoint.tokenizer)
    if template is None:
        return [asdict(one) for one in generator.samples(prompts, sample)]
    questions = [render_question(template, prompt) for prompt in prompts]
    return [asdict(one) for one in answer_all(generator, template, prompts, questions, sample)]


def _seeded(sample: SampleConfig, number: int) -> SampleConfig:
    """Return the settings of sample `number` of `sample.count`."""
    return sample.model_copy(update={"seed": sample.seed + number})


def _read_prompts(path: Path, sample: SampleConfig) -> list[str]:
    """Read prompts from a file: one per line, or one JSON object per line in a .jsonl file."""
    if sample.prompt:
        raise TextmillError("sample.prompts_file: sample.prompt is set too; set one of them")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextmillError(f"sample.prompts_file: {path}: cannot be read as UTF-8 text ({error})") from None
    if not lines:
        raise TextmillError(f"sample.prompts_file: {path}: is empty; write one prompt per line")
    return (
        [_parse_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if path.suffix == ".jsonl"
        else lines
    )


def _parse_prompt(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TextmillError(f'{where}: is not a prompt; write each line as {{"prompt": "TEXT"}}')
    prompt: str = record["prompt"]
    return prompt


def _print_json(generator: Generator, prompts: list[str], sample: SampleConfig) -> list[str]:
    """Print one JSON line per sample, in the order of the prompts."""
    texts = []
    for one in _generate_in_order(generator, [prompt for prompt in prompts for _ in range(sample.count)], sample):
        print(json.dumps(asdict(one), ensure_ascii=False), flush=True)
        texts.append(one.text)
    return texts


def _generate_in_order(generator: Generator, prompts: list[str], sample: SampleConfig) -> Iterator[Sample]:
    """Yield all samples, group by group. A group is large enough to keep the slots full most of the time."""
    size = 8 * sample.batch
    for begin in range(0, len(prompts), size):
        yield from generator.samples(prompts[begin : begin + size], _seeded(sample, begin))


def _print_samples(generator: Generator, prompt: str, sample: SampleConfig) -> list[str]:
    """Print the prompt and stream each continuation."""
    heading = f"{BOLD}{prompt}{PLAIN}" if prompt and sys.stdout.isatty() else prompt
    texts = []
    for number in range(sample.count):
        chunks = generator.stream(prompt, _seeded(sample, number))
        if number:
            print(SEPARATOR)
        print(heading, end="", flush=True)
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
                new = terminal.run_interruptible(partial(_print_samples, generator, prompt, sample))
                if new is None:
                    print(" [stopped]", flush=True)
                texts += new or []
            except TextmillError as error:
                warn(str(error))
            # The same line typed again gives another text.
            sample = _seeded(sample, sample.count)
    return texts
