"""The verb generate: a model continues a text, on the terminal as it comes or as JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textmill.checkpoints.folders import Checkpoint, WhichStep, model_of
from textmill.config import EngineConfig, RunConfig, SampleConfig
from textmill.errors import TextmillError, warn
from textmill.generation.terminal import Terminal
from textmill.tokens.chat_template import open_template

if TYPE_CHECKING:
    from textmill.generation.generator import Generator, Sample

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
BETWEEN = "-" * 40


def generate(config: RunConfig, step: WhichStep = "latest", as_json: bool = False) -> list[str]:
    """Continue `sample.prompt` `sample.count` times; without one, on a terminal, whatever is typed. Returns the new texts."""
    from textmill.generation.generator import open_generator  # torch is loaded only when there is something to do

    checkpoint = model_of(config.folder_of("train"), config.model.init_from, step)
    sample = config.sample
    prompts = [sample.prompt or ""] if sample.prompts is None else _prompts_in(Path(sample.prompts), sample)
    generator = open_generator(checkpoint, config.engine)
    if as_json or sample.prompts is not None:
        return _print_json(generator, prompts, sample)
    if sample.prompt is None and sys.stdin.isatty() and sys.stdout.isatty():
        return _converse(generator, sample, checkpoint)
    return _print_samples(generator, sample.prompt or "", sample)


def samples_of(
    checkpoint: Checkpoint, prompts: list[str], sample: SampleConfig, engine: EngineConfig
) -> list[dict[str, Any]]:
    """One continuation of each prompt, or a chat model's answer to it: prompt, text, seed and number of new tokens; the seed counts up."""
    from textmill.generation.chat_answers import answer_all, render_question
    from textmill.generation.generator import open_generator

    generator, template = open_generator(checkpoint, engine), open_template(checkpoint.tokenizer)
    if template is None:
        return [asdict(one) for one in generator.samples(prompts, sample)]
    questions = [render_question(template, prompt) for prompt in prompts]
    return [asdict(one) for one in answer_all(generator, template, prompts, questions, sample)]


def _seeded(sample: SampleConfig, number: int) -> SampleConfig:
    """The settings of sample `number` of `sample.count`."""
    return sample.model_copy(update={"seed": sample.seed + number})


def _prompts_in(path: Path, sample: SampleConfig) -> list[str]:
    """The prompts of a file: lines of text, or of JSON where its name ends with .jsonl."""
    if sample.prompt:
        raise TextmillError("sample.prompts: sample.prompt is said too; keep one of them")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextmillError(f"sample.prompts: {path}: not readable as UTF-8 text ({error})") from None
    if not lines:
        raise TextmillError(f"sample.prompts: {path}: is empty; give one prompt a line")
    return (
        [_prompt_of(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
        if path.suffix == ".jsonl"
        else lines
    )


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise TextmillError(f'{where}: is no prompt; a line is {{"prompt": "TEXT"}}')
    prompt: str = record["prompt"]
    return prompt


def _print_json(generator: Generator, prompts: list[str], sample: SampleConfig) -> list[str]:
    """A line for each sample, in the order of the prompts."""
    texts = []
    for one in _in_parts(generator, [prompt for prompt in prompts for _ in range(sample.count)], sample):
        print(json.dumps(asdict(one), ensure_ascii=False), flush=True)
        texts.append(one.text)
    return texts


def _in_parts(generator: Generator, prompts: list[str], sample: SampleConfig) -> Iterator[Sample]:
    """All samples, some of them ready long before the last; a part is large enough to keep the slots full most of the time."""
    size = 8 * sample.batch
    for begin in range(0, len(prompts), size):
        yield from generator.samples(prompts[begin : begin + size], _seeded(sample, begin))


def _print_samples(generator: Generator, prompt: str, sample: SampleConfig) -> list[str]:
    """Print the prompt and each continuation as it comes."""
    shown = f"{BOLD}{prompt}{PLAIN}" if prompt and sys.stdout.isatty() else prompt
    texts = []
    for number in range(sample.count):
        pieces = generator.stream(prompt, _seeded(sample, number))
        if number:
            print(BETWEEN)
        print(shown, end="", flush=True)
        text = ""
        for piece in pieces:
            text += piece
            print(piece, end="", flush=True)
        print("" if text.endswith("\n") else "\n", end="", flush=True)
        texts.append(text)
    return texts


def _converse(generator: Generator, sample: SampleConfig, checkpoint: Checkpoint) -> list[str]:
    """Continue line after line; a mistake in one line is said and the next is asked."""
    print(
        f"{checkpoint.folder}: type a text to continue; an empty line starts from nothing; ctrl-C stops a text, ctrl-D ends"
    )
    texts: list[str] = []
    with Terminal() as terminal:
        for prompt in terminal.lines():
            try:
                found = terminal.run_interruptible(partial(_print_samples, generator, prompt, sample))
                if found is None:
                    print(" [stopped]", flush=True)
                texts += found or []
            except TextmillError as error:
                warn(str(error))
            # The same line typed again is a wish for another text.
            sample = _seeded(sample, sample.count)
    return texts
