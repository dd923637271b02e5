"""The two ends of the socket between HTTP process and model process: what one cannot read leaves no request waiting."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.waiting import LONGEST
from textmill.config import SampleConfig, ServeConfig
from textmill.errors import EXIT_BUG, TextmillError
from textmill.generation import worker as worker_module
from textmill.generation.requests import Done, MessageSocket, Request, TextChunk, new_socket_pair
from textmill.generation.worker import Worker
from textmill.server.model_process import ModelProcess

REQUEST = Request((1,), SampleConfig())


@pytest.fixture(autouse=True)
def no_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("textmill.server.model_process.RESTART_SECONDS", ())


@asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[ModelProcess, MessageSocket]]:
    """The model process, and its own end of the socket; the process itself only waits."""
    ours, theirs = new_socket_pair()
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    tokenizer: Any = SimpleNamespace(vocab=9)
    there = MessageSocket(theirs.detach())
    model = ModelProcess(tokenizer, 512, ServeConfig(slots=1, queue=40), {})
    model.process = process
    model._worker = ours
    await model.connect()
    yield model, there
    process.kill()
    with suppress(OSError):  # a test may have done it
        there.socket.shutdown(socket.SHUT_RDWR)
    await model.close(0)
    process.communicate()


def test_an_unreadable_message_ends_all_requests(capfd: pytest.CaptureFixture[str]) -> None:
    async def end() -> Done | None:
        async with two_ends() as (model, worker):
            chunks = asyncio.Queue[TextChunk]()
            model.submit(REQUEST, chunks.put_nowait)
            worker.send(["not a state with chunks"])
            done = (await asyncio.wait_for(chunks.get(), LONGEST)).done
            with pytest.raises(TextmillError, match="has died"):
                model.submit(REQUEST, chunks.put_nowait)
        return done

    done = asyncio.run(end())
    assert done is not None
    assert done.reason == "error"
    assert "the model's process has died (SIGKILL)" in done.message
    assert "a message of the model's process cannot be read (TypeError" in capfd.readouterr().err


def test_a_request_that_cannot_be_sent_keeps_no_place() -> None:
    async def submit() -> None:
        async with two_ends() as (model, worker):
            for _ in range(42):  # more than slots and queue
                with pytest.raises(ValueError, match="surrogates not allowed"):
                    model.submit(Request((1,), SampleConfig(), stop=("\ud800",)), lambda _: None)
            assert model.stats().active == 0
            number = model.submit(REQUEST, lambda _: None)
            assert (await asyncio.to_thread(worker.receive))[:2] == ["submit", number]

    asyncio.run(submit())


def test_cancelling_at_a_closed_socket_does_nothing() -> None:
    async def cancel() -> Done | None:
        async with two_ends() as (model, worker):
            chunks = asyncio.Queue[TextChunk]()
            number = model.submit(REQUEST, chunks.put_nowait)
            worker.socket.shutdown(socket.SHUT_RDWR)
            done = (await asyncio.wait_for(chunks.get(), LONGEST)).done
            model.cancel(number)
        return done

    done = asyncio.run(cancel())
    assert done is not None
    assert done.reason == "error"


def test_unread_requests_are_kept_in_order_without_blocking() -> None:
    """More than a socket buffers: a `submit` that waits for a reader would deadlock here."""

    async def submit() -> None:
        async with two_ends() as (model, worker):
            stops = [f"{number}" + "\N{GREEK SMALL LETTER MU}" * 50_000 for number in range(40)]
            for stop in stops:
                model.submit(Request((1,), SampleConfig(), stop=(stop,)), lambda _: None)
            received = [await asyncio.to_thread(worker.receive) for _ in stops]
            assert [message[2]["stop"] for message in received] == [[stop] for stop in stops]

    asyncio.run(submit())


def test_an_unknown_command_ends_the_model_process(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, theirs = new_socket_pair()
    there = MessageSocket(theirs.detach())
    parent.send(["no such command"])
    monkeypatch.setattr(worker_module.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as exited:
        Worker(there)._read_commands()
    assert exited.value.code == EXIT_BUG
