"""A chat model's answers to single questions, through its template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from textmill.checkpoints.folders import Checkpoint, WhichStep, model_of
from textmill.config import RunConfig, SampleConfig
from textmill.errors import TextmillError
from textmill.generation.requests import Request
from textmill.tokens.chat_template import TalkTemplate, open_template
from textmill.tokens.splits import Splits, open_splits

if TYPE_CHECKING:
    from textmill.generation.generator import Generator, Sample

QUESTIONS = 3
"""Conversations that are looked up where nothing is asked."""


def open_chat_model(config: RunConfig, step: WhichStep) -> tuple[Checkpoint, TalkTemplate]:
    """The model that a config stands for, and the template it was finetuned with."""
    checkpoint = model_of(config.folder_of("train"), config.model.init_from, step)
    template = open_template(checkpoint.tokenizer)
    if template is None:
        raise TextmillError(f"{checkpoint.folder}: this model was not finetuned for chat; use textmill generate")
    return checkpoint, template


def answer(config: RunConfig, step: WhichStep = "latest") -> list[str]:
    """Ask a chat model `sample.prompt`, or what the valid split asks first; print and return the talks, as the template writes them."""
    from textmill.generation.generator import open_generator  # torch is loaded only when there is something to do

    checkpoint, template = open_chat_model(config, step)
    prompt = config.sample.prompt
    questions = (
        [render_question(template, prompt)] * config.sample.count
        if prompt
        else list(read_questions(open_splits(config)))
    )
    generator = open_generator(checkpoint, config.engine)
    found = answer_all(
        generator, template, [generator.tokenizer.decode(ids) for ids in questions], questions, config.sample
    )
    talks = [one.prompt + one.text for one in found]
    print("\n".join(talks), flush=True)
    return talks


def render_question(template: TalkTemplate, question: str) -> list[int]:
    """The ids that ask a question and for its answer."""
    return template.render([{"role": "user", "content": question}], add_generation_prompt=True)


def answer_all(
    generator: Generator, template: TalkTemplate, names: list[str], questions: list[list[int]], sample: SampleConfig
) -> list[Sample]:  # fmt: skip
    """The answer to each question, under its name; the seed counts up with the questions."""
    settings = [
        sample.model_copy(update={"seed": sample.seed + number, "slide": False}) for number in range(len(questions))
    ]
    stops, ends = tuple(sample.stop), tuple(template.stop_ids)
    requests = [Request(tuple(ids), one, stops, ends) for ids, one in zip(questions, settings, strict=True)]
    return generator.sampled(names, requests, sample.batch)


def read_questions(splits: Splits) -> Iterator[list[int]]:
    """How the first conversations of the valid split begin, up to the first answer; of the train split, where there is no other."""
    stores = [store for split in ("valid", "train") for store in splits.of(split) if store.asked is not None][:1]
    for store in stores:
        for place in range(min(QUESTIONS, len(store))):
            begin, end = store.borders(np.array([place, place + 1])).tolist()
            answered = np.flatnonzero(store.asked[begin:end]) if store.asked is not None else np.zeros(0, np.int64)
            if len(answered):
                yield np.asarray(store.ids[begin : begin + int(answered[0])]).tolist()
