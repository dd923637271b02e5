"""A conversation with a model, through its class and on a real terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from textmill.checkpoints.folders import Checkpoint
from textmill.cli import main
from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation.chat import Conversation, Message
from textmill.generation.generator import Generator
from textmill.generation.prompts import Terminal
from textmill.generation.requests import Request
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


class PlainTemplate:
    """A template that separates turns by end-of-text tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.stop_ids = tokenizer, (tokenizer.eos_id,)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        ids = []
        for message in messages:
            ids += [*self.tokenizer.encode(f"{message['role'][0]} {message['content']}"), self.tokenizer.eos_id]
        return [*ids, *self.tokenizer.encode("a ")] if add_generation_prompt else ids


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A model folder."""
    shutil.copytree(checkpoint.folder, tmp_path / "model", ignore=lambda *_: ["progress.json"])
    return tmp_path / "model"


@pytest.fixture
def conversation(generator: Generator) -> Iterator[Conversation]:
    sample = SampleConfig(max_tokens=8, min_tokens=8, seed=3)
    with Terminal() as terminal:
        yield Conversation(generator, PlainTemplate(generator.tokenizer), sample, terminal)


def generate_answer(conversation: Conversation, messages: list[Message], seed: int) -> str:
    """Return the generator's answer to messages rendered by the template."""
    ids = conversation.template.render(messages, add_generation_prompt=True)
    request = Request(tuple(ids), conversation.sample.model_copy(update={"seed": seed}))
    return "".join(event.text for _, event in conversation.generator.run([request], 1))


def test_earlier_turns_are_sent_and_reset_clears_them(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation.handle_line("Hi")
    first = capsys.readouterr().out
    conversation.handle_line("And?")
    contents = [message["content"] for message in conversation.messages]
    assert contents[::2] == ["Hi", "And?"]
    assert first == contents[1] + "\n"
    answers = [generate_answer(conversation, conversation.messages[:count], seed) for count, seed in ((1, 3), (3, 4))]
    assert contents[1::2] == answers
    conversation.handle_line("/reset")
    assert conversation.messages == []


def test_set_changes_all_settings_or_none(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    conversation.handle_line("/set temperature=0.5 top_k=3")
    assert (conversation.sample.temperature, conversation.sample.top_k) == (0.5, 3)
    assert "temperature=0.5" in capsys.readouterr().out
    for bad, match in [
        ("/set temperature=-1", "at least 0"),
        ("/set top_k=4 heat=3", "no such key"),
        ("/set cold", "section.key=value"),
    ]:
        with pytest.raises(TextmillError, match=match):
            conversation.handle_line(bad)
    assert (conversation.sample.temperature, conversation.sample.top_k) == (0.5, 3)
    conversation.handle_line("/what")
    assert "/reset" in capsys.readouterr().out
    conversation.handle_line("   ")
    assert conversation.messages == []


def test_oldest_turns_are_dropped_when_the_context_is_full(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        conversation.handle_line(f"number {number} of several")
    assert "dropped its oldest turns" in capsys.readouterr().err
    assert conversation.messages[-2]["content"] == "number 5 of several"
    assert 2 <= len(conversation.messages) < 12
    with pytest.raises(TextmillError, match="too long"):
        conversation.handle_line("물레방아 " * 60)


def test_model_without_a_template_gives_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(model)]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "this model was not finetuned for chat; use textmill generate, or finetune it with" in message


PROGRAM = """
    import sys
    from textmill.generation import chat
    from textmill.tokens.vocabulary.tokenizer import open_tokenizer

    class Template:
        def __init__(self, folder):
            self.tokenizer = open_tokenizer(folder)
            self.stop_ids = ()
        def render(self, messages, add_generation_prompt):
            return self.tokenizer.encode("".join(message["content"] for message in messages))[-20:]

    from textmill.generation import generator
    import time
    run = generator.Generator.run
    def slowly(self, requests, together):
        for number, event in enumerate(run(self, requests, together)):
            yield event
            if requests[0].sample.max_tokens == 70 and number == 5:
                time.sleep(600)

    generator.Generator.run = slowly
    chat.open_template = Template
    from textmill.cli import main
    settings = ["sample.max_tokens=6", "sample.min_tokens=6", "engine.device=cpu", "engine.precision=fp32"]
    sys.exit(main(["chat", {folder!r}, *settings]))
"""


class Screen:
    """A program on its own pseudo-terminal."""

    def __init__(self, code: str, root: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": str(root)}
        self.program = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            cwd=root,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(slave)
        self.shown = ""

    def wait_for(self, pattern: str, typing: str = "") -> str:
        """Read until the output matches a pattern; return the output up to there. Meanwhile type `typing` every second.

        A key pressed between a prompt and the read after it may be noticed only at the next key.
        """
        until = time.monotonic() + 300
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < until, self.shown
            assert self.type_and_read(typing), self.shown
        part, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return part

    def type_and_read(self, typing: str) -> bool:
        """Type something and read output for a second; return whether the program still has the terminal."""
        try:
            self.type(typing)
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
        except OSError:
            return False
        return True

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_conversation_on_a_terminal(model: Path, root: Path) -> None:
    screen = Screen(textwrap.dedent(PROGRAM).format(folder=str(model)), root)
    try:
        screen.wait_for("ctrl-D ends\r\n> ")
        screen.type("The mill\n")
        assert len(screen.wait_for("\r\n.+\r\n> ")) > len("The mill\r\n\r\n> ")
        screen.type("/set temperature=0.7\n")
        screen.wait_for("temperature=0.7 .*> ")
        screen.type("/set max_tokens=70 min_tokens=70\n")
        screen.wait_for("max_tokens=70 .*> ")
        # Ctrl-C in the middle of an answer that would take minutes more.
        screen.type("The wheel\n")
        screen.wait_for("The wheel\r\n.+")
        screen.type("\x03")
        screen.wait_for(r"\[stopped\]\r\n> ")
        screen.type("/reset\n")
        screen.wait_for("conversation cleared\r\n> ")
        screen.type("/set heat=1\n")
        screen.wait_for("no such key.*> ")
        # Ctrl-C at the prompt ends nothing, however often it is pressed.
        screen.wait_for("ctrl-D ends.*> ", typing="\x03" * 50)
        screen.wait_for("conversation cleared.*> ", typing="/reset\n")
        until = time.monotonic() + 300
        while screen.type_and_read("\x04"):
            assert time.monotonic() < until, screen.shown
        assert screen.program.wait(60) == 0, screen.shown
    finally:
        screen.program.kill()
        screen.program.wait()
        os.close(screen.master)


def test_ctrl_c_stops_the_answer_but_not_the_program(
    conversation: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(requests: list[object], together: int) -> object:
        try:
            for event in Generator.run(conversation.generator, requests, together):
                yield event
                if getattr(event[1], "text", ""):
                    signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation.generator, "run", run)
    conversation.handle_line("Hi")
    contents = conversation.messages[-1]["content"]
    assert contents
    assert capsys.readouterr().out == f"{contents} [stopped]\n"
    monkeypatch.undo()
    conversation.handle_line("More")
    assert len(conversation.messages) == 4
