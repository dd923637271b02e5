"""Valid loss of a small net after equal steps, with and without options: hints which are worth a trial on a GPU.

    python bench/options_cpu.py CORPUS.jsonl.xz [steps=200] [seeds=1,2] [NAME:key=value/key=value ...]

Without names it runs the table of docs/llama.md; about a minute for each name and seed on an idle core. Keys are those
of bench/time_to_loss.py. The net has 3 layers, 2 heads and width 64; 4,096 tokens are fitted on the first 8 million
characters of the corpus; a step has 16 windows of 64 tokens. Of the training documents of bench/time_to_loss.py the
last 40,000 tokens are the validation split.
"""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from time_to_loss import SETTINGS, TICKS, batch_at, evaluate, open_initial_engine, shuffle_windows
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from textmill.training.run_length import lr_at

CHARACTERS, VOCAB, VALID = 8e6, 4096, 40_000
SMALL = {
    "family": "llama",
    "shape": "3x2x64",
    "length": 64,
    "valid": 32768,
    "compile": 0,
    "precision": "fp32",
    "batch": 16,
    "learning_rate": 1e-2,
    "adamw_rate_factor": 1.0,
    "vocab": VOCAB,
}
FAST = "embedding_rate_factor=8"
TABLE = [
    "tied:",
    "untied:set=untied:true",
    f"untied, {FAST}:set=untied:true/{FAST}",
    "untied, factor 24:set=untied:true/embedding_rate_factor=24",
    f"untied, {FAST}, qk_norm:set=untied:true,qk_norm:true/{FAST}",
]


def read_tokens(corpus: Path) -> Any:
    """Return the tokens of the first documents, with an end-of-text token after each."""
    texts, size = [], 0
    with lzma.open(corpus, "rt", encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            size += len(texts[-1])
            if size > CHARACTERS:
                break
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=VOCAB - 1, show_progress=False))
    encoded = [one.ids for number, one in enumerate(bpe.encode_batch_fast(texts)) if number % 100 != 7]
    return np.concatenate([np.array([*ids, VOCAB - 1], np.uint16) for ids in encoded])


def train_and_evaluate(settings: dict[str, Any], steps: int, tokens: Any) -> float:
    """Return the validation loss after the steps."""
    train, valid, size = tokens[:-VALID], tokens[-VALID:], settings["batch"]
    engine, config = open_initial_engine(settings)
    starts = shuffle_windows(settings, train)
    for step in range(steps):
        rate = lr_at(step * TICKS // steps, config)
        batch = batch_at(train, starts, step * size, settings, size)
        engine.train_step(batch, step, rate)
    return evaluate(engine, valid, settings)


def main(arguments: list[str]) -> None:
    """Print the loss of each name, and its mean over the seeds."""
    given = dict(argument.split("=") for argument in arguments[1:] if ":" not in argument)
    torch.set_num_threads(1)
    tokens = read_tokens(Path(arguments[0]))
    for one in [argument for argument in arguments[1:] if ":" in argument] or TABLE:
        name, _, changes = one.partition(":")
        settings = {**SETTINGS, **SMALL}
        for key, value in (change.split("=") for change in changes.split("/") if change):
            settings[key] = type(SETTINGS[key])(value)
        seeds = map(int, given.get("seeds", "1,2").split(","))
        losses = [
            train_and_evaluate({**settings, "seed": seed}, int(given.get("steps", 200)), tokens) for seed in seeds
        ]
        print(f"{name}: {np.mean(losses):.3f} ({', '.join(f'{loss:.3f}' for loss in losses)})", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
