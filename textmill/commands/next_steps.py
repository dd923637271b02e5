"""What `run` proposes at its end: commands that use the model, and commands that would make it better."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from contextlib import redirect_stderr, suppress
from io import StringIO
from itertools import islice
from pathlib import Path

from textmill.checkpoints.adapters import is_adapter
from textmill.config import SIZES, STAGE_FOLDERS, ModelConfig, RunConfig
from textmill.config.model import is_family_file
from textmill.corpus.reader import open_corpus
from textmill.errors import TextmillError
from textmill.models import own_options, read_shape
from textmill.planning.project_file import second_generation
from textmill.planning.verdict import RunFacts, State, state_of
from textmill.storage.files import format_path
from textmill.where import open_where

MAX_NAMED_SOURCES = 8
"""A proposed command that names the sources names all of them; for more, another one is proposed."""
READ_DOCUMENTS = 20
"""Documents in which the words of a prompt are looked for."""
WORDS = re.compile(r"\b[^\W\d_]{2,16} [^\W\d_]{2,16}\b|[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff]{2,8}")
"""Two words; of scripts without spaces (Thai, Lao, Japanese, Chinese) a few characters."""


def print_next_steps(config: RunConfig, checkpoint: Path, facts: RunFacts, *, evaluated: bool) -> None:
    """Say where the model is and which commands use it or make it better; `evaluated`: `run` has measured it."""
    where = shlex.join(_where_of(config))
    only_textmill = is_family_file(config.model.family) or own_options(read_shape(checkpoint))
    adapter = is_adapter(checkpoint)
    opened_by = (
        "only textmill opens it"
        if only_textmill
        else f"{'an adapter: PEFT' if adapter else 'transformers'} can open it"
    )
    print(f"\nAll stages are done. The model is {format_path(checkpoint)} ({opened_by}). Next:")
    if config.corpus.labels:
        print(f"  textmill evaluate {where} evaluate.text=FILE")
    elif config.train.layout == "masked":
        print(f"  textmill fill {where} sample.prompt='a text with [MASK]'")
        print(f"  textmill embed {where} 'a text' 'another text'")
        if not evaluated:
            print(f"  textmill evaluate {where} evaluate.tasks=pseudo_perplexity evaluate.sample=1000")
    elif config.train.layout == "chat":
        print(f"  textmill chat {where}")
    else:
        print(f"  textmill generate {where} sample.prompt={shlex.quote(_prompt_of(config))} sample.count=3")
    for line in improving_commands(config, state_of(facts), where):
        print(f"  {line}")


def _prompt_of(config: RunConfig) -> str:
    """Two words of a text that the model has not seen, so that they are of its language."""
    with suppress(TextmillError):  # existing tokens need no corpus
        for document in islice(open_corpus(config.folder_of("corpus"), "valid"), READ_DOCUMENTS):
            if found := WORDS.search(document.text):
                return found.group()
    return "Once more"


def _where_of(config: RunConfig) -> list[str]:
    """WHERE of the commands to type next: the root folder if it opens with these settings, else the run's folder."""
    run = config.folder_of("train")
    for folder in (Path(config.folder), run):
        words = [format_path(folder)]
        with suppress(TextmillError), redirect_stderr(StringIO()):  # what it warns of was printed at the start
            if _are_same(open_where(words[0], []).config, config):
                return words
    # A family's file is code, which runs only if the user names it.
    own = [f"model.family={config.model.family}"] if is_family_file(config.model.family) else []
    return [format_path(run), *own]


def _are_same(opened: RunConfig, config: RunConfig) -> bool:
    """Whether both read and write the same folders with the same results."""
    folders = all(opened.folder_of(stage).resolve() == config.folder_of(stage).resolve() for stage in STAGE_FOLDERS)
    return folders and opened.results(*STAGE_FOLDERS, "model") == config.results(*STAGE_FOLDERS, "model")


def improving_commands(config: RunConfig, state: State, where: str) -> list[str]:
    """Commands that would make the model better, by what limits it now."""
    train = config.train
    name = config.model.family
    if config.corpus.labels:
        if not train.epochs or state == "overfitting":
            return []
        return [f"textmill train {where} train.epochs={2 * train.epochs:g}"]
    family = f" --family {name}" if name in SIZES and name != ModelConfig().family else ""
    run = format_path(config.folder_of("train"))
    tune = f"textmill tune {where} --minutes 60"
    with_more_text = f"textmill new {_free_name('larger')} --text 'more texts/*.txt'{family}"
    if state == "overfitting":
        decay = f"train.weight_decay={max(0.1, 2 * train.weight_decay):g}"
        return [f"textmill run {where} {decay} train.folder={shlex.quote(run + '-2')}", tune]
    if state == "unknown":  # without a valid split nothing can be tuned, and nobody knows whether more time helps
        return [with_more_text]
    if state == "limited by the text":
        if train.distil.teachers or train.layout == "masked":
            return [tune, with_more_text]
        return [second_generation(where, run), tune, with_more_text]
    if train.minutes is None:
        return [
            f"textmill train {where} train.{train.unit}={2 * getattr(train, train.unit)}",
            f"textmill new {(mine := _free_name('mine'))} --text 'texts/*.txt'{family} && textmill run {mine}",
        ]
    if len(config.corpus.sources) > MAX_NAMED_SOURCES:
        return [f"textmill train {where} train.minutes={4 * train.minutes:g}", tune]
    sources = " ".join(f"--text {shlex.quote(_short_path(source))}" for source in config.corpus.sources)
    same = f" --family {name}" if name in SIZES else ""  # without it, `new` may choose another family
    return [f"textmill new {_free_name('longer')} {sources}{same} --minutes {4 * train.minutes:g}", tune]


def _free_name(name: str) -> str:
    """A folder that does not exist: `new` refuses one that does."""
    names = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(one for one in names if not os.path.exists(one))


def _short_path(source: str) -> str:
    return format_path(Path(source)) if os.path.isabs(source) else source
