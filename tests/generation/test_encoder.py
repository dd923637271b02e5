"""Requests for embeddings and masks: small requests pass large ones, and every request ends once, whatever happens."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import LONGEST, wait_for
from textmill.errors import TextmillError
from textmill.generation.encoder import STEP_TOKENS, EncoderBatch
from textmill.generation.requests import EmbedRequest, FillRequest, QueueFull, TextChunk
from textmill.generation.scheduler import Scheduler
from textmill.generation.worker import ChunkCollector

LARGE = EmbedRequest(((7,) * 512,) * 40)
SMALL = EmbedRequest(((1, 2), (3,)))


class Model:
    """An embedder whose vector is the sum and the length of the ids; `gate` holds back its steps."""

    def __init__(self) -> None:
        self.texts = SimpleNamespace(dimension=2)
        self.net = SimpleNamespace(head=SimpleNamespace(device=SimpleNamespace(type="cpu")))
        self.gate, self.steps, self.fails = threading.Semaphore(0), list[int](), False

    def embed_ids(self, ids: Sequence[Any]) -> Any:
        self.gate.acquire()
        self.steps.append(sum(map(len, ids)))
        if self.fails:
            raise ValueError("broken")
        return np.array([[one.sum(), len(one)] for one in ids], np.float32).reshape(-1, 2)

    def open(self, steps: int) -> None:
        for _ in range(steps):
            self.gate.release()


def new_encoder(filler: Any = None, **limits: int) -> tuple[Any, Model, dict[str, TextChunk], Any]:
    model, found = Model(), dict[str, TextChunk]()
    batch = EncoderBatch(model, filler)  # type: ignore[arg-type]
    encoder = Scheduler(None, batch, **{"slots": 2, "queue": 1, **limits})

    def submit(name: str, request: Any, deadline: float | None = None) -> int:
        collector = ChunkCollector(lambda chunk: found.__setitem__(name, chunk), False, False)
        return encoder.submit(request, collector, deadline)

    return encoder, model, found, submit


@dataclass
class Filled:
    prompt: str
    choices: int


class Filler:
    """A token for each word of a text; `sizes` are the texts of each call."""

    def __init__(self) -> None:
        self.texts, self.sizes = SimpleNamespace(encode=str.split), list[int]()

    def fill(self, prompts: Sequence[str], choices: int) -> list[Filled]:
        self.sizes.append(len(prompts))
        return [Filled(prompt, choices) for prompt in prompts]


def vectors(chunk: TextChunk) -> Any:
    assert chunk.done is not None
    assert chunk.done.reason == "stop"
    return np.frombuffer(base64.b64decode(chunk.text), "<f4").reshape(-1, 2)


def test_a_small_request_passes_a_large_one() -> None:
    encoder, model, found, submit = new_encoder()
    submit("large", LARGE)
    submit("small", SMALL)
    model.open(3)
    wait_for(lambda: "small" in found, lambda: found)
    assert "large" not in found
    assert vectors(found["small"]).tolist() == [[3, 2], [3, 1]]
    assert found["small"].done.tokens == 3  # type: ignore[union-attr]
    model.open(100)
    wait_for(lambda: "large" in found, lambda: found)
    assert vectors(found["large"]).tolist() == [[7 * 512, 512]] * 40
    assert max(model.steps) <= STEP_TOKENS["cpu"] + 512, "at least one text of each request"
    encoder.close(LONGEST)


def test_a_small_request_passes_many_masks() -> None:
    filler = Filler()
    encoder, model, found, submit = new_encoder(filler)
    prompts = tuple(f"{number} " + "word " * 99 for number in range(40))
    submit("fill", FillRequest(prompts, 7))
    submit("small", SMALL)
    model.open(2)
    wait_for(lambda: "small" in found, lambda: found)
    assert "fill" not in found
    model.open(100)
    wait_for(lambda: "fill" in found, lambda: found)
    assert json.loads(found["fill"].text) == [{"prompt": prompt, "choices": 7} for prompt in prompts]
    assert found["fill"].done.tokens == 4000  # type: ignore[union-attr]
    assert max(filler.sizes) * 100 <= STEP_TOKENS["cpu"] + 100
    encoder.close(LONGEST)


def test_more_requests_than_tokens_in_a_step() -> None:
    count = STEP_TOKENS["cpu"] + 100
    encoder, model, found, submit = new_encoder(slots=1024)
    for number in range(count):
        submit(str(number), SMALL)
    model.open(5)
    wait_for(lambda: len(found) == count, lambda: len(found))
    assert all(vectors(chunk).tolist() == [[3, 2], [3, 1]] for chunk in found.values())
    encoder.close(LONGEST)


def test_cancelled_late_and_too_many_requests() -> None:
    encoder, model, found, submit = new_encoder()
    number = submit("large", LARGE)
    submit("late", LARGE, time.monotonic())
    submit("waiting", SMALL)
    with pytest.raises(QueueFull):
        submit("too many", SMALL)
    with pytest.raises(TextmillError, match="no head for masked tokens"):
        submit("fill", FillRequest(("[MASK]",), 5))
    encoder.cancel(number)
    model.open(100)
    wait_for(lambda: len(found) == 3, lambda: found)
    reasons = {name: chunk.done.reason for name, chunk in found.items() if chunk.done}
    assert reasons == {"large": "cancelled", "late": "timeout", "waiting": "stop"}
    assert encoder.stats().cancelled == 1
    assert encoder.stats().active == 0
    encoder.close(LONGEST)


def test_a_failed_step_ends_its_requests_and_later_ones_work() -> None:
    encoder, model, found, submit = new_encoder()
    model.fails = True
    submit("one", SMALL)
    model.open(1)
    wait_for(lambda: "one" in found, lambda: found)
    assert found["one"].done == found["one"].done
    assert found["one"].done.reason == "error"  # type: ignore[union-attr]
    assert found["one"].done.message == "the model failed: ValueError"  # type: ignore[union-attr]
    model.fails = False
    submit("two", SMALL)
    model.open(1)
    wait_for(lambda: "two" in found, lambda: found)
    assert vectors(found["two"]).shape == (2, 2)
    assert encoder.problem(1000) == ""
    encoder.close(LONGEST)


def test_closing_cancels_what_is_left_after_the_grace() -> None:
    encoder, model, found, submit = new_encoder()
    submit("large", LARGE)
    closing = threading.Thread(target=encoder.close, args=(0,))
    closing.start()
    model.open(100)
    closing.join(LONGEST)
    assert found["large"].done is not None
    assert found["large"].done.reason == "cancelled"
    with pytest.raises(TextmillError, match="closing"):
        submit("late", SMALL)
