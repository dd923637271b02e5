"""What holds for each thread of a model, scheduler and encoder: no accepted request is lost, and closing is safe."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import LONGEST
from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation.encoder import EncoderThread
from textmill.generation.generator import Generator
from textmill.generation.requests import Done, EmbedRequest
from textmill.generation.scheduler import Scheduler

ENDLESS = SampleConfig(max_tokens=10**9, min_tokens=10**9)


class Case:
    """A thread, a request that takes many steps, and the ends that were delivered."""

    def __init__(self, thread: Any, request: Any) -> None:
        self.thread, self.request = thread, request
        self.ends: queue.Queue[Done] = queue.Queue()
        self.fail_step = threading.Event()

    def submit(self, on_end: Callable[[], None] = lambda: None) -> int:
        """Submit the request; `on_end` is called in the thread, with its last event."""

        def deliver(event: Any) -> None:
            done = event if isinstance(event, Done) else getattr(event, "done", None)
            if done is not None:
                on_end()
                self.ends.put(done)

        number: int = self.thread.submit(self.request, deliver)
        return number

    def next_end(self) -> Done:
        """Return the next request's end."""
        return self.ends.get(timeout=LONGEST)

    def check_exit(self) -> None:
        """Called by every step."""
        if self.fail_step.is_set():
            sys.exit(1)


@pytest.fixture(params=["scheduler", "encoder"])
def case(request: pytest.FixtureRequest, generator: Generator) -> Any:
    """Each kind of thread."""
    if request.param == "scheduler":
        scheduler = Scheduler(generator, slots=2, queue=2)
        case = Case(scheduler, generator.new_request("The mill", ENDLESS))
        decode = scheduler._batch.slots.decode
        scheduler._batch.slots.decode = lambda *args: (case.check_exit(), decode(*args))[1]  # type: ignore[method-assign]
    else:
        net = SimpleNamespace(shape=SimpleNamespace(positions=9), head=SimpleNamespace(device=SimpleNamespace()))
        net.head.device.type = "cpu"
        texts = SimpleNamespace(tokenizer=SimpleNamespace(vocab=9), dimension=1)
        embed_ids = lambda ids: (case.check_exit(), np.zeros((len(ids), 1), np.float32))[1]  # noqa: E731
        embedder: Any = SimpleNamespace(net=net, texts=texts, embed_ids=embed_ids)
        case = Case(EncoderThread(embedder, None, slots=2, queue=2), EmbedRequest(((1,) * 512,) * 100_000))
    yield case
    case.thread.close(0)


def test_a_dying_thread_refuses_requests_and_ends_the_others(case: Case) -> None:
    refused: list[str] = []

    def submit_another() -> None:
        with pytest.raises(TextmillError) as error:
            case.submit()
        refused.append(str(error.value))

    case.submit(submit_another)
    case.submit()
    case.fail_step.set()
    message = "the model's thread has died; restart the server"
    assert [case.next_end(), case.next_end()] == [Done("error", 0, "", message)] * 2
    case.thread._thread.join(LONGEST)
    with pytest.raises(TextmillError, match=message):
        case.submit()
    assert refused == [message]
    assert case.thread.stats()["active"] == case.thread.stats()["waiting"] == 0


def test_close_may_be_called_by_the_thread_itself_and_twice(case: Case) -> None:
    errors: list[Exception] = []

    def close_twice() -> None:
        try:
            case.thread.close(0)
            case.thread.close(LONGEST)  # must not allow more time
        except Exception as error:
            errors.append(error)

    first = case.submit(close_twice)
    case.submit()
    case.thread.cancel(first)
    assert [case.next_end().reason, case.next_end().reason] == ["cancelled", "cancelled"]
    assert errors == []
    case.thread._thread.join(LONGEST)
    assert not case.thread._thread.is_alive()


def test_a_failure_to_drop_a_text_loses_no_request(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(Scheduler(generator, slots=2, queue=2), generator.new_request("The mill", ENDLESS))
    monkeypatch.setattr(case.thread._batch, "drop", lambda *_: 1 // 0)
    numbers = [case.submit() for _ in range(3)]
    case.thread.cancel(numbers[0])
    assert [case.next_end().reason for _ in numbers] == ["error"] * 3
