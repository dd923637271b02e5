"""Answers single questions with a chat model, through its chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import RunConfig, SampleConfig
from textmill.errors import TextmillError
from textmill.generation.requests import Request
from textmill.models import check_next_token, find_run_model, read_shape
from textmill.storage.files import format_path
from textmill.tokens.chat_template import AnyTemplate, open_template
from textmill.tokens.splits import Splits, open_splits

if TYPE_CHECKING:
    from textmill.generation.generator import GeneratedText, Generator

QUESTIONS = 3
"""Conversations taken from the valid split if there is no prompt."""


def open_chat_model(config: RunConfig, step: StepChoice | None) -> tuple[Checkpoint, AnyTemplate]:
    """Return the checkpoint that a config names, and its chat template."""
    checkpoint = find_run_model(config, step)
    template = open_template(checkpoint.tokenizer)
    if template is None:
        check_next_token(read_shape(checkpoint.folder), checkpoint.folder, "chat")
        raise TextmillError(
            f"{format_path(checkpoint.folder)}: this model was not finetuned for chat; use textmill generate, or "
            "finetune it with questions and answers (docs/walk.md)"
        )
    return checkpoint, template


def answer(config: RunConfig, step: StepChoice | None = None) -> list[str]:
    """Answer `sample.prompt`, or the first questions of the valid split; print and return question and answer."""
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    checkpoint, template = open_chat_model(config, step)
    prompt = config.sample.prompt
    questions = [render_question(template, prompt)] if prompt else list(read_questions(open_splits(config)))
    generator = open_generator(checkpoint, config.engine)
    names = [generator.tokenizer.decode(ids) for ids in questions]
    count = config.sample.count if prompt else 1
    samples = answer_all(generator, template, names, questions, config.sample, count)
    texts = [one.prompt + one.text for one in samples]
    print("\n".join(texts), flush=True)
    return texts


def render_question(template: AnyTemplate, question: str) -> list[int]:
    """Return the token ids of a question and the start of its answer."""
    return template.render([{"role": "user", "content": question}], add_generation_prompt=True)


def answer_all(
    generator: Generator,
    template: AnyTemplate,
    names: list[str],
    questions: list[list[int]],
    sample: SampleConfig,
    count: int = 1,
) -> list[GeneratedText]:
    """Answer each question `count` times; `names` become the samples' prompts. The seed counts up from answer to
    answer."""
    sample = sample.model_copy(update={"slide_context": False})
    stops = tuple(sample.stop)
    ends = tuple(template.stop_ids)
    requests = [Request(tuple(ids), sample, stops, ends) for ids in questions]
    return generator.complete(names, requests, sample, count)


def read_questions(splits: Splits) -> Iterator[list[int]]:
    """Yield the first conversations of the valid split, or of the train split, each up to its first answer."""
    stores = [store for split in ("valid", "train") for store in splits.stores(split) if store.loss_mask is not None][
        :1
    ]
    for store in stores:
        for place in range(min(QUESTIONS, len(store))):
            begin, end = store.document_starts(np.array([place, place + 1])).tolist()
            answered = (
                np.flatnonzero(store.loss_mask[begin:end]) if store.loss_mask is not None else np.zeros(0, np.int64)
            )
            if len(answered):
                yield np.asarray(store.ids[begin : begin + int(answered[0])]).tolist()
