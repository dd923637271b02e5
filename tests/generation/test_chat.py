"""A talk with a model, by its class and on a real terminal."""

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
from textmill.config import RunConfig, SampleConfig, TorchEngine
from textmill.errors import TextmillError
from textmill.generation.chat import Conversation, Message
from textmill.generation.generator import Generator
from textmill.generation.requests import Request
from textmill.generation.terminal import Terminal
from textmill.tokens.vocabulary.tokenizer import TextTokenizer


class PlainTemplate:
    """Turns between end-of-text tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer, self.stop_ids = tokenizer, (tokenizer.end,)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        ids = []
        for message in messages:
            ids += [*self.tokenizer.encode(f"{message['role'][0]} {message['content']}"), self.tokenizer.end]
        return [*ids, *self.tokenizer.encode("a ")] if add_generation_prompt else ids


@pytest.fixture
def model(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The model as a folder by itself."""
    shutil.copytree(checkpoint.folder, tmp_path / "model", ignore=lambda *_: ["progress.json"])
    return tmp_path / "model"


@pytest.fixture
def talk(generator: Generator, engine: TorchEngine) -> Iterator[Conversation]:
    config = RunConfig(engine=engine, sample=SampleConfig(max_tokens=8, min_tokens=8, seed=3))
    with Terminal() as terminal:
        yield Conversation(generator, PlainTemplate(generator.tokenizer), config, terminal)


def answer_to(talk: Conversation, messages: list[Message], seed: int) -> str:
    """What the generator says to a talk as the template writes it."""
    ids = talk.template.render(messages, add_generation_prompt=True)
    request = Request(tuple(ids), talk.config.sample.model_copy(update={"seed": seed}))
    return "".join(event.text for _, event in talk.generator.run([request], 1))


def test_the_talk_so_far_is_seen_and_reset_forgets_it(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.handle_line("Hi")
    first = capsys.readouterr().out
    talk.handle_line("And?")
    said = [message["content"] for message in talk.messages]
    assert said[::2] == ["Hi", "And?"]
    assert first == said[1] + "\n"
    assert said[1::2] == [answer_to(talk, talk.messages[:1], 3), answer_to(talk, talk.messages[:3], 4)]
    talk.handle_line("/reset")
    assert talk.messages == []


def test_settings_are_changed_whole_or_not_at_all(talk: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    talk.handle_line("/set temperature=0.5 top_k=3")
    assert (talk.sample.temperature, talk.sample.top_k) == (0.5, 3)
    assert "temperature=0.5" in capsys.readouterr().out
    for bad, match in [
        ("/set temperature=-1", "at least 0"),
        ("/set top_k=4 heat=3", "no such key"),
        ("/set cold", "section.key=value"),
    ]:
        with pytest.raises(TextmillError, match=match):
            talk.handle_line(bad)
    assert (talk.sample.temperature, talk.sample.top_k) == (0.5, 3)
    talk.handle_line("/what")
    assert "/reset" in capsys.readouterr().out
    talk.handle_line("   ")
    assert talk.messages == []


def test_the_oldest_turns_are_forgotten_when_the_model_sees_no_more(
    talk: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(6):
        talk.handle_line(f"number {number} of several")
    assert "dropped its oldest turns" in capsys.readouterr().err
    assert talk.messages[-2]["content"] == "number 5 of several"
    assert 2 <= len(talk.messages) < 12
    with pytest.raises(TextmillError, match="too long"):
        talk.handle_line("물레방아 " * 60)


def test_a_model_without_a_template_says_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(model)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "this model was not finetuned for chat; use textmill generate" in told


PROGRAM = """
    import sys
    from textmill.generation import chat_answers
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
    chat_answers.open_template = Template
    from textmill.cli import main
    sys.exit(main(["chat", {folder!r}, "sample.max_tokens=6", "sample.min_tokens=6", "engine.device=cpu", "engine.precision=fp32"]))
"""


class Screen:
    """A program on a terminal of its own."""

    def __init__(self, code: str, root: Path) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "PYTHONPATH": str(root)}
        self.program = subprocess.Popen(
            [sys.executable, "-c", code], stdin=slave, stdout=slave, stderr=slave, env=environment, cwd=root, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self.shown = ""

    def wait_for(self, pattern: str, typing: str = "") -> str:
        """Read until something is shown after what was waited for before, typing so long as nothing is; that part.

        A key pressed between a prompt's last letter and the read behind it may be noticed only at the next key.
        """
        until = time.monotonic() + 300
        while not (found := re.search(pattern, self.shown, re.DOTALL)):
            assert time.monotonic() < until, self.shown
            assert self.goes_on(typing), self.shown
        part, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return part

    def goes_on(self, typing: str) -> bool:
        """Type something, and read what is shown within a second; whether the program still has the terminal."""
        try:
            self.type(typing)
            if select.select([self.master], [], [], 1)[0]:
                self.shown += os.read(self.master, 65536).decode("utf-8", "replace")
        except OSError:
            return False
        return True

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())


def test_a_talk_on_a_terminal(model: Path, root: Path) -> None:
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
        while screen.goes_on("\x04"):
            assert time.monotonic() < until, screen.shown
        assert screen.program.wait(60) == 0, screen.shown
    finally:
        screen.program.kill()
        screen.program.wait()
        os.close(screen.master)


def test_ctrl_c_stops_the_answer_and_not_the_program(
    talk: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(requests: list[object], together: int) -> object:
        try:
            for event in Generator.run(talk.generator, requests, together):
                yield event
                if getattr(event[1], "text", ""):
                    signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(talk.generator, "run", run)
    talk.handle_line("Hi")
    said = talk.messages[-1]["content"]
    assert said
    assert capsys.readouterr().out == f"{said} [stopped]\n"
    monkeypatch.undo()
    talk.handle_line("More")
    assert len(talk.messages) == 4
