"""The chat command: a conversation with a model on the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from textmill.checkpoints.folders import StepChoice
from textmill.config import RunConfig, SampleConfig
from textmill.config.load import build_config, merge_trees, parse_settings
from textmill.errors import TextmillError, warn
from textmill.generation.chat_answers import open_chat_model
from textmill.generation.requests import Request
from textmill.generation.terminal import Terminal, is_terminal
from textmill.tokens.chat_template import AnyTemplate, Message

if TYPE_CHECKING:
    from textmill.generation.generator import Generator

HELP = (
    "/reset forgets the conversation, /set temperature=0.7 changes a setting, /set shows all, "
    "ctrl-C stops an answer, ctrl-D ends"
)


def chat(config: RunConfig, step: StepChoice | None = None) -> None:
    """Chat with a model until the input ends."""
    checkpoint, template = open_chat_model(config, step)
    from textmill.generation.generator import open_generator  # imports torch, which is slow

    generator = open_generator(checkpoint, config.engine)
    with Terminal() as terminal:
        conversation = Conversation(generator, template, config, terminal)
        if is_terminal(sys.stdin):
            print(f"{checkpoint.folder}: {HELP}")
        for line in terminal.lines():
            try:
                conversation.handle_line(line)
            except TextmillError as error:
                warn(str(error))


class Conversation:
    """The messages so far, and the settings of the next answer."""

    def __init__(self, generator: Generator, template: AnyTemplate, config: RunConfig, terminal: Terminal) -> None:
        self.generator = generator
        self.template = template
        self.config = config
        self.terminal = terminal
        self.messages: list[Message] = []
        self.answers = 0

    @property
    def sample(self) -> SampleConfig:
        """The settings of the next answer; each answer has its own seed."""
        sample = self.config.sample
        return sample.model_copy(update={"seed": sample.seed + self.answers, "slide_context": False})

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
        self.config = build_config(merge_trees(self.config.model_dump(mode="json"), tree))
        hidden = {"prompt", "prompts_file", "count", "batch", "slide_context"}
        print(" ".join(f"{key}={value}" for key, value in self.config.sample.model_dump(exclude=hidden).items()))

    def _answer(self, line: str) -> None:
        ids = self._render([*self.messages, {"role": "user", "content": line}])
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

    def _render(self, messages: list[Message]) -> list[int]:
        """Return the conversation's token ids; drop the oldest turns until there is space for an answer."""
        positions = self.generator.positions
        dropped = False
        space = max(min(self.config.sample.max_tokens, positions // 4), 1)
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
