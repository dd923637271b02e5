"""The fill command: the most likely tokens for each mask of a text, for people to read or as JSON lines.

`MaskedTexts` makes the token ids of a text with masks; without torch, since the server checks texts too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig
from textmill.errors import TextmillError, warn
from textmill.generation.prompts import Terminal, find_prompts, is_terminal
from textmill.models import find_run_model
from textmill.tokens.vocabulary.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from textmill.generation.encoder import Filled, Filler

DEFAULT_CHOICES = 5
"""Tokens that are returned for a mask if the request does not say how many."""


def fill(
    config: RunConfig, texts: Sequence[str] = (), step: StepChoice | None = None, as_json: bool = False
) -> list[str]:
    """Fill the masks of each text, of `sample.prompt`, or without them of every line that is typed or piped in.

    Returns the texts with the most likely token in each mask; `sample.top_k` is how many are shown.
    """
    from textmill.generation.encoder import open_filler  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    sample = config.sample
    in_settings = sample.prompt is not None or sample.prompts_file is not None
    if texts and in_settings:
        raise TextmillError("sample.prompt or sample.prompts_file: is set, and texts are given too; give one of them")
    typed = not (as_json or texts or in_settings) and is_terminal(sys.stdin) and is_terminal(sys.stdout)
    found = [] if typed else [(text, "TEXT") for text in texts] or find_prompts(sample)
    filler = open_filler(checkpoint, config.engine)
    choices = sample.top_k or DEFAULT_CHOICES
    if typed:
        print(f"{checkpoint.folder}: type a text with {filler.texts.mask}; ctrl-D ends")
        return list(_fill_lines(filler, choices))
    for prompt, place in found:
        filler.texts.check(prompt, place)
    return [_print(one, as_json) for one in filler.fill([prompt for prompt, _ in found], choices)]


def _fill_lines(filler: Filler, choices: int) -> Iterator[str]:
    """Fill each line that is typed; after an error, report it and read the next line."""
    with Terminal() as terminal:
        for prompt in terminal.lines():
            try:
                for one in terminal.run_interruptible(partial(_fill_line, filler, prompt, choices)) or ():
                    yield _print(one, as_json=False)
            except TextmillError as error:
                warn(str(error))


def _fill_line(filler: Filler, prompt: str, choices: int) -> list[Filled]:
    filler.texts.check(prompt)
    return list(filler.fill([prompt], choices))


def _print(filled: Filled, as_json: bool) -> str:
    if as_json:
        print(json.dumps(asdict(filled), ensure_ascii=False), flush=True)
        return filled.text
    print(filled.text)
    for choices in filled.masks:
        print("  " + ", ".join(f"{one.token} {100 * one.probability:.1f}%" for one in choices), flush=True)
    return filled.text


@dataclass(frozen=True)
class MaskedTexts:
    """A tokenizer with its mask, and the longest text of a model."""

    tokenizer: TextTokenizer
    longest: int
    """In tokens, special ones included."""
    mask_id: int
    first_id: int

    @property
    def mask(self) -> str:
        """How the mask is written."""
        return str(self.tokenizer.inner.id_to_token(self.mask_id))

    def encode(self, prompt: str) -> list[int]:
        """[CLS], the text with its masks, [SEP]; other text that looks like a special token is plain text."""
        ids: list[int] = [self.first_id]
        for number, part in enumerate(prompt.split(self.mask)):
            ids += [self.mask_id] if number else []
            ids += self.tokenizer.encode(part)
        return [*ids, self.tokenizer.sep_id]

    def check(self, prompt: str, field: str = "sample.prompt") -> int:
        """Refuse a text without a mask, or one that is too long; return the number of its tokens."""
        if self.mask not in prompt:
            raise TextmillError(f"{field}: {prompt[:60]!r} has no {self.mask}; write it where a token is missing")
        if (count := len(self.encode(prompt))) > self.longest:
            raise TextmillError(
                f"{field}: {prompt[:60]!r} has {count:,} tokens, the model reads {self.longest:,}; shorten it"
            )
        return count


def new_masked_texts(tokenizer: TextTokenizer, longest: int, where: Path | str) -> MaskedTexts:
    """The masked texts of a model; `where` names it in errors."""
    mask = tokenizer.mask_id
    first = tokenizer.cls_id
    if mask is None or first is None:
        raise TextmillError(f"{where}: its tokenizer has no mask token such as [MASK], or no [CLS]; use another one")
    return MaskedTexts(tokenizer, longest, mask, first)
