"""Writes BERT's examples as TFRecord files: the samples of the masked layout, one per row, for some epochs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from textmill.config import MaskedConfig, RunConfig
from textmill.corpus.document import SPLITS
from textmill.errors import TextmillError
from textmill.storage.files import atomic_writer, remove_folder
from textmill.tokens.batches.masked import MaskedLayout, has_spans
from textmill.tokens.batches.masked_tokens import masked_tokens_of
from textmill.tokens.bert_examples import to_examples
from textmill.tokens.split_files import make_file_folder, write_split_files
from textmill.tokens.store import open_store
from textmill.tokens.tfrecord import count_records, write_records
from textmill.tokens.vocabulary.tokenizer import open_tokenizer

FOLDER = "tfrecord"
INDEX = "tfrecord-index"
"""The subfolder of the tokens folder with the files, and that of the spans while they are written."""
FILE_TOKENS = 1 << 23
"""About how many tokens go into one file."""
ROWS = 512
"""Samples built at a time."""


@dataclass(frozen=True)
class ExampleFile:
    """A task for one worker: consecutive samples, and the file that they are written to."""

    prefix: Path
    samples: range
    path: Path
    tokenizer: Path
    length: int
    seed: int | None
    settings: MaskedConfig


def examples_made_from(config: RunConfig) -> dict[str, Any]:
    """The settings of training that decide the examples; none if no examples are written."""
    if config.tokens.kind != "tfrecord":
        return {}
    masked = {name: value for name, value in config.results("train").items() if name.startswith("train.masked.")}
    return {"train.length": config.train.length, "train.seed": config.train.seed, **masked}


def check_examples(config: RunConfig) -> None:
    """Raise an error before anything is encoded if examples cannot be written."""
    if config.tokens.kind == "tfrecord" and config.train.length is None:
        raise TextmillError(
            "train.length: is not set, and tokens.kind=tfrecord writes samples of it; set it, such as 128"
        )


def write_examples(config: RunConfig, folder: Path) -> dict[str, dict[str, Any]]:
    """If `tokens.kind=tfrecord`, write the examples of every split; return length and checksum of each file."""
    if config.tokens.kind != "tfrecord":
        return {}
    make_file_folder(folder / FOLDER)
    tasks = [task for split in SPLITS for task in _plan_files(config, folder, split)]
    rows, files = write_split_files(config, tasks, write_file, "examples")
    print(f"tokenize: {rows:,} examples of {config.train.length} tokens in {len(tasks)} files of {FOLDER}/")
    remove_folder(folder / INDEX)
    return files


def _plan_files(config: RunConfig, folder: Path, split: str) -> list[ExampleFile]:
    """The files of a split: all epochs of train, shuffled, and the other splits once."""
    settings = config.train.masked.model_copy(update={"pack": False})
    if not has_spans(open_store(folder / split), settings):
        return []
    length = int(config.train.length or 0)
    seed = config.train.seed if split == "train" else None
    whole = ExampleFile(
        folder / split, range(0), folder / FOLDER, config.folder_of("tokenizer"), length, seed, settings
    )
    count = _open_layout(whole).samples_per_epoch * (config.tokens.tfrecord.epochs if split == "train" else 1)
    files = max(1, round(count * length / FILE_TOKENS))
    edges = [count * number // files for number in range(files + 1)]
    names = [f"{split}-{number:05d}-of-{files:05d}.tfrecord" for number in range(files)]
    return [
        ExampleFile(
            whole.prefix,
            range(edges[number], edges[number + 1]),
            folder / FOLDER / name,
            whole.tokenizer,
            length,
            seed,
            settings,
        )
        for number, name in enumerate(names)
    ]


def _open_layout(task: ExampleFile) -> MaskedLayout:
    tokenizer = open_tokenizer(task.tokenizer)
    return MaskedLayout(
        open_store(task.prefix),
        length=task.length,
        seed=task.seed,
        tokens=masked_tokens_of(tokenizer, task.settings),
        settings=task.settings,
        folder=task.prefix.parent / INDEX,
    )


def write_file(task: ExampleFile) -> int:
    """Write one file of examples unless it exists already; return how many it has."""
    if not task.path.exists():
        layout = _open_layout(task)
        predictions = int(layout.tokens.rule.predictions(np.array([task.length]))[0])
        with atomic_writer(task.path) as stream:
            for start in range(task.samples.start, task.samples.stop, ROWS):
                rows = layout.build_samples(np.arange(start, min(start + ROWS, task.samples.stop), dtype=np.int64))
                write_records(stream, to_examples(rows, task.settings.max_predictions or predictions))
    return count_records(task.path)
