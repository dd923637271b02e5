"""The verb chat: a talk with a model on the terminal; ctrl-C stops an answer, ctrl-D the program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from textmill.checkpoints.folders import WhichStep
from textmill.config import RunConfig, SampleConfig
from textmill.config.load import config_of, merged, tree_of
from textmill.errors import TextmillError, warn
from textmill.generation.chat_answers import open_chat_model
from textmill.generation.requests import Request
from textmill.generation.terminal import Terminal
from textmill.tokens.chat_template import Message, TalkTemplate

if TYPE_CHECKING:
    from textmill.generation.generator import Generator

HELP = "/reset forgets the talk, /set temperature=0.7 changes a setting, /set shows them, ctrl-C stops an answer, ctrl-D ends"


def chat(config: RunConfig, step: WhichStep = "latest") -> None:
    """Conversation with a model until the input ends."""
    checkpoint, template = open_chat_model(config, step)
    from textmill.generation.generator import open_generator  # torch is loaded only when there is something to do

    generator = open_generator(checkpoint, config.engine)
    with Terminal() as terminal:
        talk = Conversation(generator, template, config, terminal)
        if sys.stdin.isatty():
            print(f"{checkpoint.folder}: {HELP}")
        for line in terminal.lines():
            try:
                talk.hear(line)
            except TextmillError as error:
                warn(str(error))


class Conversation:
    """What was said so far, and how the model is to answer."""

    def __init__(self, generator: Generator, template: TalkTemplate, config: RunConfig, terminal: Terminal) -> None:
        self.generator, self.template, self.config, self.terminal = generator, template, config, terminal
        self.messages: list[Message] = []
        self.answers = 0

    @property
    def sample(self) -> SampleConfig:
        """The settings of the next answer; each has a seed of its own."""
        sample = self.config.sample
        return sample.model_copy(update={"seed": sample.seed + self.answers, "slide": False})

    def hear(self, line: str) -> None:
        """Answer a line, or do what a command says."""
        word, _, rest = line.strip().partition(" ")
        if word == "/reset":
            self.messages = []
            print("forgotten")
        elif word == "/set":
            self._set(rest.split())
        elif word.startswith("/"):
            print(HELP)
        elif line.strip():
            self._answer(line)

    def _set(self, words: list[str]) -> None:
        """Change settings of this talk; all of them or, when one is wrong, none."""
        tree = tree_of([word if word.startswith("sample.") else f"sample.{word}" for word in words])
        self.config = config_of(merged(self.config.model_dump(mode="json"), tree))
        hidden = {"prompt", "prompts", "count", "batch", "slide"}
        print(" ".join(f"{key}={value}" for key, value in self.config.sample.model_dump(exclude=hidden).items()))

    def _answer(self, line: str) -> None:
        ids = self._ids_of([*self.messages, {"role": "user", "content": line}])
        request = Request(tuple(ids), self.sample, tuple(self.sample.stop), tuple(self.template.stop_ids))
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

    def _ids_of(self, messages: list[Message]) -> list[int]:
        """The talk as the model wants it; turns that leave no room for an answer are forgotten, the oldest first."""
        positions, forgotten = self.generator.positions, False
        room = min(self.config.sample.max_tokens, positions // 4)
        while True:
            ids = list(self.template.render(messages, add_generation_prompt=True))
            if len(ids) <= positions - max(room, 1):
                break
            if len(messages) == 1:
                found = (
                    f"{len(ids):,} tokens; the model sees {positions:,} at a time, and an answer needs {max(room, 1)}"
                )
                raise TextmillError(f"what you said is too long: {found}; say it in less")
            messages, forgotten = messages[2:], True
        if forgotten:
            self.messages = messages[:-1]
            warn("the talk is longer than the model sees; its oldest turns are forgotten")
        return ids
