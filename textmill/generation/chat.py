"""The chat command: a conversation with a model on the terminal. Also answers to single questions, for `run`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from textmill.checkpoints.folders import Checkpoint, StepChoice
from textmill.config import RunConfig, SampleConfig
from textmill.config.load import build_config, merge_trees, parse_settings
from textmill.errors import TextmillError, warn
from textmill.generation.constraints import sample_grammar
from textmill.generation.prompts import Terminal, is_terminal
from textmill.generation.requests import Request
from textmill.models import check_next_token, find_run_model, read_shape
from textmill.storage.files import format_path
from textmill.tokens.chat import AnyTemplate, Message, open_template
from textmill.tokens.splits import Splits, open_splits

if TYPE_CHECKING:
    from textmill.generation.generator import GeneratedText, Generator


HELP = (
    "/reset forgets the conversation, /set temperature=0.7 changes a setting, /set shows all, "
    "ctrl-C stops an answer, ctrl-D ends"
)
QUESTIONS = 3
"""Conversations that `answer` takes from the valid split if there is no prompt."""


def chat(config: RunConfig, step: StepChoice | None = None) -> None:
    """Chat with a model until the input ends."""
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    template = _open_template(checkpoint)
    generator = open_generator(checkpoint, config.engine)
    generator.keep_texts(1)
    with Terminal() as terminal:
        conversation = Conversation(generator, template, config.sample, terminal)
        if is_terminal(sys.stdin):
            print(f"{checkpoint.folder}: {HELP}")
        for line in terminal.lines():
            try:
                conversation.handle_line(line)
            except TextmillError as error:
                warn(str(error))


class Conversation:
    """The messages so far, and the settings of the next answer."""

    def __init__(self, generator: Generator, template: AnyTemplate, sample: SampleConfig, terminal: Terminal) -> None:
        self.generator = generator
        self.template = template
        self.sample = sample
        """The settings of the first answer; the seed counts up from answer to answer."""
        self.terminal = terminal
        self.messages: list[Message] = []
        self.answers = 0

    def handle_line(self, line: str) -> None:
        """Answer a line, or run a command."""
        command, _, rest = line.strip().partition(" ")
        if command == "/reset":
            self.messages = []
            print("conversation cleared")
        elif command == "/set":
            self._set(rest.split())
        elif command.startswith("/"):
            print(HELP)
        elif line.strip():
            self._answer(line)

    def _set(self, arguments: list[str]) -> None:
        """Change settings of this conversation; if one is wrong, none is changed."""
        tree = parse_settings([one if one.startswith("sample.") else f"sample.{one}" for one in arguments])
        self.sample = build_config(merge_trees({"sample": self.sample.model_dump(mode="json")}, tree)).sample
        hidden = {"prompt", "prompts_file", "count", "batch", "slide_context"}
        print(" ".join(f"{key}={value}" for key, value in self.sample.model_dump(exclude=hidden).items()))

    def _answer(self, line: str) -> None:
        ids = self._render([*self.messages, {"role": "user", "content": line}])
        sample = self.sample.model_copy(update={"seed": self.sample.seed + self.answers, "slide_context": False})
        grammar = sample_grammar(sample)
        request = Request(tuple(ids), sample, tuple(sample.stop), tuple(self.template.stop_ids), grammar=grammar)
        self.answers += 1
        texts: list[str] = []

        def answer() -> bool:
            for _, event in self.generator.run([request], 1):
                texts.append(event.text)
                print(event.text, end="", flush=True)
            return True

        if not self.terminal.run_interruptible(answer):
            print(" [stopped]", end="")
        print(flush=True)
        self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": "".join(texts)}]

    def _render(self, messages: list[Message]) -> list[int]:
        """Return the conversation's token ids; drop the oldest turns until there is space for an answer."""
        positions = self.generator.positions
        dropped = False
        space = max(min(self.sample.max_tokens, positions // 4), 1)
        while True:
            ids = list(self.template.render(messages, add_generation_prompt=True))
            if len(ids) <= positions - space:
                break
            if len(messages) == 1:
                raise TextmillError(
                    f"your message is too long: {len(ids):,} tokens; the model's context is {positions:,}, and an "
                    f"answer needs {space}; shorten the message"
                )
            messages = messages[2:]
            dropped = True
        if dropped:
            self.messages = messages[:-1]
            warn("the conversation is longer than the model's context; dropped its oldest turns")
        return ids


def answer(config: RunConfig, step: StepChoice | None = None) -> list[str]:
    """Answer `sample.prompt`, or the first questions of the valid split; print and return question and answer."""
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    checkpoint = find_run_model(config, step)
    template = _open_template(checkpoint)
    prompt = config.sample.prompt
    questions = [render_question(template, prompt)] if prompt else list(_read_questions(open_splits(config)))
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
    grammar = sample_grammar(sample)
    requests = [Request(tuple(ids), sample, stops, ends, grammar=grammar) for ids in questions]
    return generator.complete(names, requests, sample, count)


def _read_questions(splits: Splits) -> Iterator[list[int]]:
    """Yield the first conversations of the valid split, or of the train split, each up to its first answer."""
    stores = [store for split in ("valid", "train") for store in splits.stores(split) if store.loss_mask is not None]
    for store in stores[:1]:
        assert store.loss_mask is not None
        for place in range(min(QUESTIONS, len(store))):
            begin, end = store.document_starts(np.array([place, place + 1])).tolist()
            answered = np.flatnonzero(store.loss_mask[begin:end])
            if len(answered):
                yield np.asarray(store.ids[begin : begin + int(answered[0])]).tolist()


def _open_template(checkpoint: Checkpoint) -> AnyTemplate:
    """Return the chat template of a model; raise if it has none."""
    template = open_template(checkpoint.tokenizer)
    if template is None:
        check_next_token(read_shape(checkpoint.folder), checkpoint.folder, "chat")
        raise TextmillError(
            f"{format_path(checkpoint.folder)}: this model was not finetuned for chat; use textmill generate, or "
            "finetune it with questions and answers (docs/walk.md)"
        )
    return template
