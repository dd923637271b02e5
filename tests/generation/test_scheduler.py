"""Requests join, finish, are cancelled and time out; each ends once, no slot leaks, and texts are independent."""

from __future__ import annotations

import dataclasses
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.waiting import LONGEST, wait_for
from textmill.config import SampleConfig
from textmill.errors import TextmillError
from textmill.generation import scheduler as scheduling
from textmill.generation.constraints import choice_grammar, json_grammar
from textmill.generation.encoder import EncoderBatch
from textmill.generation.generator import Generator
from textmill.generation.requests import Done, EmbedRequest, ModelStats, QueueFull, Request, Token
from textmill.generation.scheduler import PREFILL_SECONDS, Scheduler

LONG = SampleConfig(max_tokens=10**9, min_tokens=10**9)


@dataclass
class Reader:
    """Collects delivered events."""

    events: queue.Queue[Token | Done] = field(default_factory=queue.Queue)
    seen: list[Token | Done] = field(default_factory=list)

    def __call__(self, event: Token | Done) -> None:
        self.events.put(event)

    def next(self) -> Token | Done:
        self.seen.append(self.events.get(timeout=LONGEST))
        return self.seen[-1]

    def done(self) -> Done:
        while not isinstance(event := self.next(), Done):
            pass
        return event

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.seen)


@pytest.fixture
def scheduler(generator: Generator) -> Iterator[Scheduler]:
    scheduler = Scheduler(generator, slots=4, queue=3)
    yield scheduler
    scheduler.close(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's clock, moved by the test."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("textmill.generation.scheduler.time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def request(generator: Generator, prompt: str = "The mill", sample: SampleConfig = LONG) -> Request:
    return generator.new_request(prompt, sample)


def test_text_does_not_depend_on_other_requests(generator: Generator) -> None:
    dice = random.Random(4)
    prompts = [
        "The mill",
        "물레방아는",
        "",
        "Değirmen köprünün üstünde duruyor",
        "a",
        "🎡",
        "The wheel begins to turn every morning and",
    ]
    samples = [
        SampleConfig(
            seed=number,
            max_tokens=dice.randint(1, 120),
            temperature=dice.choice([0.0, 0.8, 1.5]),
            top_k=dice.choice([0, 20]),
            top_p=dice.choice([1.0, 0.9]),
            min_p=dice.choice([0.0, 0.1]),
            min_tokens=dice.choice([0, 9]),
            repetition_penalty=dice.choice([1.0, 1.2]),
            presence_penalty=dice.choice([0.0, 0.5]),
            frequency_penalty=dice.choice([0.0, 0.2]),
            slide_context=dice.random() < 0.5,
        ).model_copy(update={"stop": dice.choice([[], ["e"], ["물", "th"]])})
        for number in range(14)
    ]
    chosen = [dice.choice(prompts) for _ in samples]
    scheduler = Scheduler(generator, slots=7, queue=100)
    readers = [Reader() for _ in samples]
    for prompt, sample, reader in zip(chosen, samples, readers, strict=True):
        scheduler.submit(request(generator, prompt, sample), reader)
    ends = [reader.done() for reader in readers]
    scheduler.close(0)
    alone = [generator.sample(prompt, sample) for prompt, sample in zip(chosen, samples, strict=True)]
    assert [reader.text for reader in readers] == [one.text for one in alone]
    assert [done.tokens for done in ends] == [one.tokens for one in alone]
    assert {done.reason for done in ends} == {"stop", "length"}
    new = [sum(isinstance(event, Token) for event in reader.seen) for reader in readers]
    assert new == [done.tokens for done in ends]
    assert len(set(new)) > 6


def test_computing_ahead_changes_no_text(generator: Generator) -> None:
    """As on a GPU: the next step starts before the last token is read, while requests come and go."""
    dice = random.Random(6)
    requests = [
        generator.new_request(
            dice.choice(["The mill", "물레방아는", "", "a"]),
            SampleConfig(
                seed=number,
                max_tokens=dice.choice([1, 2, 7, 20, 99]),
                temperature=dice.choice([0.0, 0.9]),
                min_tokens=dice.choice([0, 5]),
                repetition_penalty=dice.choice([1.0, 1.0, 1.0, 1.0, 1.3]),
                slide_context=dice.random() < 0.5,
            ),
        )
        for number in range(30)
    ]
    grammars = ["", "", json_grammar({"type": "array"}, "schema"), choice_grammar(["a", "the mill"], "choices")]
    requests = [
        dataclasses.replace(
            one, stop=dice.choice([(), ("e",)]), logprobs=dice.choice([0, 0, 2]), grammar=dice.choice(grammars)
        )
        for one in requests
    ]
    alone = [[event for _, event in generator.run([request], 1)] for request in requests]
    batch, found, waiting = generator.new_batch(4), [[] for _ in requests], list(enumerate(requests))
    batch.run_ahead = True
    while waiting or batch.running or batch.waiting:
        while waiting and batch.free and dice.random() < 0.7:
            number, one = waiting.pop(0)
            batch.add(number, one)
            if number % 5 == 4:
                for _ in range(dice.randint(0, 3)):
                    for place, event in batch.step():
                        found[place].append(event)
                done = batch.drop(number, "cancelled")
                found[number] += [done] if done else []
        for place, event in batch.step():
            found[place].append(event)
    for number, (one, other) in enumerate(zip(found, alone, strict=True)):
        if one[-1].reason == "cancelled":
            assert number % 5 == 4
            assert [event.id for event in one[:-1]] == [event.id for event in other[: len(one) - 1]]
            continue
        assert [event._replace(logprob=None, top=()) if isinstance(event, Token) else event for event in one] == [
            event._replace(logprob=None, top=()) if isinstance(event, Token) else event for event in other
        ]
        logs = [
            [event.logprob for event in events if isinstance(event, Token) and event.logprob is not None]
            for events in (one, other)
        ]
        assert logs[0] == pytest.approx(logs[1], abs=1e-4)
    assert batch.free == 4


def test_prompt_with_several_samples_is_prefilled_once(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = generator.new_batch(9)
    prefill, read = batch.slots.prefill, []
    monkeypatch.setattr(
        batch.slots, "prefill", lambda first, contexts: [prefill(first, contexts), read.extend(contexts)][0]
    )
    prompts = ["The mill", "물레방아는", "The mill", "a", "The mill", "물레방아는", "a", "", ""]
    samples = [SampleConfig(seed=number, max_tokens=20) for number in range(len(prompts))]
    requests = [
        dataclasses.replace(request(generator, *pair), logprobs=2) for pair in zip(prompts, samples, strict=True)
    ]
    requests[4] = dataclasses.replace(requests[4], echo=True)
    found: list[list[Token | Done]] = [[] for _ in prompts]
    for number, one in enumerate(requests):
        batch.add(number, one)
    while batch.running or batch.waiting:
        for number, event in batch.step():
            found[number].append(event)
    assert sorted(map(tuple, filter(None, read))) == sorted(set(one.ids[:-1] for one in requests if len(one.ids) > 1))
    for events, one in zip(found, requests, strict=True):
        alone = [event for _, event in generator.run([one], 1)]
        assert [event.text for event in events] == [event.text for event in alone]
        logs = [
            [log for log, _ in event.prompt_logprobs[1:]]
            for event in (events[-1], alone[-1])
            if isinstance(event, Done)
        ]
        assert logs[0] == pytest.approx(logs[1], abs=1e-5)


def test_request_joins_while_others_run(generator: Generator, scheduler: Scheduler) -> None:
    first, second = Reader(), Reader()
    number = scheduler.submit(request(generator), first)
    assert isinstance(first.next(), Token)
    scheduler.submit(request(generator, "물", SampleConfig(max_tokens=5, min_tokens=5)), second)
    assert second.done() == Done("length", 5, second.seen[-1].text)
    assert scheduler.stats().active == 1
    scheduler.cancel(number)
    assert first.done().reason == "cancelled"


def test_new_requests_are_prefilled_together_while_many_run(
    generator: Generator, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait until their waiting time adds up to what the prefill costs the running ones; one alone does join."""
    scheduler, readings = Scheduler(generator, slots=44, queue=9), []
    prefill = scheduler._batch.slots.prefill

    def record(first: int, contexts: list[list[int]]) -> object:
        if max(map(len, contexts)) < 10:  # others are of texts that have filled all positions
            readings.append(len(contexts))
        return prefill(first, contexts)

    monkeypatch.setattr(scheduler._batch.slots, "prefill", record)
    at_work, newcomers, late = ([Reader() for _ in range(count)] for count in (40, 3, 1))
    for reader in at_work:
        scheduler.submit(request(generator), reader)
        clock.now += 1
        reader.next()
    readings.clear()
    for number, reader in enumerate(newcomers):
        scheduler.submit(request(generator, "ab" * (number + 1)), reader)
    for _ in range(5):
        at_work[-1].next()
    assert (scheduler.stats().active, scheduler.stats().waiting, readings) == (40, 3, [])
    clock.now += PREFILL_SECONDS * 40 / 3 + 0.001
    for reader in newcomers:
        assert isinstance(reader.next(), Token)
    assert readings == [3]
    scheduler.submit(request(generator, "abc"), late[0])
    assert scheduling.MAX_JOIN_WAIT < PREFILL_SECONDS * 43
    clock.now += scheduling.MAX_JOIN_WAIT + 0.001
    assert isinstance(late[0].next(), Token)
    scheduler.close(0)


def test_cancel_frees_the_slot_at_the_next_step(generator: Generator) -> None:
    scheduler, first, second = Scheduler(generator, slots=1, queue=2), Reader(), Reader()
    number = scheduler.submit(request(generator), first)
    assert isinstance(first.next(), Token)
    waiting = scheduler.submit(request(generator), second)
    assert scheduler.stats().waiting == 1
    scheduler.cancel(number)
    done = first.done()
    assert done.reason == "cancelled"
    assert done.tokens == len(first.seen) - 1
    assert isinstance(second.next(), Token)
    scheduler.cancel(waiting)
    scheduler.cancel(12345)
    assert second.done().reason == "cancelled"
    scheduler.close(0)
    assert scheduler.stats().cancelled == 2


def test_after_cancel_only_the_current_step_is_delivered(generator: Generator) -> None:
    """Cancelled from the scheduler's own thread, the next event is the end."""
    scheduler, seen, over = Scheduler(generator, slots=1, queue=1), [], threading.Event()

    def deliver(event: Token | Done) -> None:
        seen.append(event)
        if len(seen) == 3:
            scheduler.cancel(1)
        if isinstance(event, Done):
            over.set()

    scheduler.submit(request(generator), deliver)
    assert over.wait(LONGEST)
    assert len(seen) == 4
    assert seen[-1].reason == "cancelled"
    scheduler.close(0)


def test_full_queue_is_reported_and_each_request_ends_once(generator: Generator, scheduler: Scheduler) -> None:
    readers = [Reader() for _ in range(7)]
    numbers = [scheduler.submit(request(generator), reader) for reader in readers]
    assert len(set(numbers)) == 7
    with pytest.raises(QueueFull):
        scheduler.submit(request(generator), Reader())
    wait_for(lambda: scheduler.stats().active == 4)
    assert scheduler.stats().waiting == 3
    with pytest.raises(QueueFull):
        scheduler.submit(request(generator), Reader())
    for number in numbers:
        scheduler.cancel(number)
    assert {reader.done().reason for reader in readers} == {"cancelled"}
    after = Reader()
    scheduler.submit(request(generator, sample=SampleConfig(max_tokens=1, min_tokens=1)), after)
    assert after.done().reason == "length"
    assert all(reader.events.empty() for reader in readers)


def test_deadline_ends_running_and_waiting_requests(generator: Generator, clock: SimpleNamespace) -> None:
    scheduler = Scheduler(generator, slots=1, queue=1)
    readers = [Reader(), Reader()]
    for reader in readers:
        scheduler.submit(request(generator), reader, deadline=1.0)
    readers[0].next()
    clock.now = 2.0
    assert [reader.done().reason for reader in readers] == ["timeout", "timeout"]
    assert isinstance(readers[0].seen[0], Token)
    assert scheduler.stats().active == scheduler.stats().waiting == 0
    scheduler.close(0)


def test_close_waits_for_running_requests_then_cancels(generator: Generator, clock: SimpleNamespace) -> None:
    scheduler = Scheduler(generator, slots=1, queue=3)
    short, queued, endless = Reader(), Reader(), Reader()
    brief = SampleConfig(max_tokens=5, min_tokens=5)
    scheduler.submit(request(generator, sample=brief), short)

    def last(event: Token | Done) -> None:
        queued(event)
        clock.now = 2 * LONGEST if isinstance(event, Done) else 0.0

    scheduler.submit(request(generator, sample=brief), last)
    scheduler.submit(request(generator), endless)
    scheduler.close(LONGEST)
    assert [reader.done().reason for reader in (short, queued, endless)] == ["length", "length", "cancelled"]
    with pytest.raises(TextmillError, match="closing"):
        scheduler.submit(request(generator), Reader())
    scheduler.close(0)
    assert not scheduler._thread.is_alive()


def test_close_of_an_idle_scheduler_returns(generator: Generator) -> None:
    scheduler = Scheduler(generator, slots=2, queue=1)
    scheduler.close(1000)
    assert not scheduler._thread.is_alive()


def test_no_slot_leaks_after_cancelled_requests(generator: Generator) -> None:
    dice, scheduler = random.Random(1), Scheduler(generator, slots=5, queue=20)
    readers = []
    for _ in range(150):
        reader = Reader()
        while True:
            try:
                number = scheduler.submit(request(generator, dice.choice(["The mill", "물레방아", ""])), reader)
                break
            except QueueFull:
                time.sleep(0.001)
        if dice.random() < 0.5:
            reader.next()
        scheduler.cancel(number)
        readers.append(reader)
    assert all(reader.done().reason == "cancelled" for reader in readers)
    stats = dataclasses.replace(scheduler.stats(), tokens=0)
    assert stats == ModelStats(active=0, waiting=0, slots=5, queue=20, tokens=0, requests=150, cancelled=150)
    assert scheduler._batch.free == 5
    after = [Reader() for _ in range(5)]
    sample = SampleConfig(max_tokens=6, seed=9)
    for reader in after:
        scheduler.submit(request(generator, sample=sample), reader)
    for reader in after:
        reader.done()
    assert {reader.text for reader in after} == {generator.sample("The mill", sample).text}
    scheduler.close(0)


def test_impossible_request_is_refused_at_once(generator: Generator, scheduler: Scheduler) -> None:
    for bad, match in [
        (Request((), LONG), "no tokens"),
        (Request((10**6,), LONG), "is not a token id"),
        (Request((1,), LONG, stop_ids=(-1,)), "is not a token id"),
        (Request((1,), LONG, bias=((99999, 1.0),)), "is not a token id"),
        (Request((1,) * 96, LONG), "the model's context is 96"),
        (Request((1,), SampleConfig(beams=2)), "the server has no beam search"),
    ]:
        with pytest.raises(TextmillError, match=match):
            scheduler.submit(bad, Reader())
    assert scheduler.stats().requests == 0


def test_failing_reader_is_cancelled_and_others_continue(
    generator: Generator, scheduler: Scheduler, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(event: Token | Done) -> None:
        raise OSError("gone")

    scheduler.submit(request(generator), fail)
    wait_for(lambda: scheduler.stats().cancelled == 1)
    reader = Reader()
    scheduler.submit(request(generator, sample=SampleConfig(max_tokens=3, min_tokens=3)), reader)
    assert reader.done().reason == "length"
    assert "delivering its text failed (OSError)" in capsys.readouterr().err


def test_model_error_is_reported_and_later_requests_work(
    generator: Generator, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, reader = scheduler._batch.slots.decode, Reader()
    monkeypatch.setattr(scheduler._batch.slots, "decode", lambda *_: 1 // 0)
    scheduler.submit(request(generator), reader)
    assert reader.done() == Done("error", 0, "", "the model failed: ZeroDivisionError")
    monkeypatch.setattr(scheduler._batch.slots, "decode", decode)
    again = Reader()
    scheduler.submit(request(generator, sample=SampleConfig(max_tokens=3, min_tokens=3)), again)
    assert again.done().reason == "length"


def test_nan_logits_end_their_own_text_only(
    generator: Generator, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = scheduler._batch.slots.decode

    def spoiled(ids_N: object, places: list[int]) -> object:
        scores = decode(ids_N, places).clone()
        scores[[place for place, row in enumerate(scheduler._batch.running) if row.number == 1]] = float("nan")
        return scores

    monkeypatch.setattr(scheduler._batch.slots, "decode", spoiled)
    readers, sample = [Reader(), Reader()], SampleConfig(max_tokens=8, min_tokens=8)
    for reader in readers:
        scheduler.submit(request(generator, sample=sample), reader)
    assert readers[0].done().reason == "error"
    assert "not finite" in readers[0].seen[-1].message
    assert readers[1].done().reason == "length"
    assert readers[1].text == generator.sample("The mill", sample).text
    assert scheduler.problem(LONGEST) == "", "the other texts work"


def test_model_whose_every_text_fails_is_broken(
    generator: Generator, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.check_model()
    decode = scheduler._batch.slots.decode
    monkeypatch.setattr(scheduler._batch.slots, "decode", lambda *args: decode(*args) * float("nan"))
    with pytest.raises(TextmillError, match="not finite"):
        scheduler.check_model()
    for _ in range(3):
        assert scheduler.problem(LONGEST) == ""
        scheduler.submit(request(generator), reader := Reader())
        assert reader.done().reason == "error"
    wait_for(lambda: "last 3 steps failed" in scheduler.problem(LONGEST))


def test_hung_or_dead_model_is_reported(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, reader, hung = Scheduler(generator, slots=1, queue=2), Reader(), threading.Event()
    decode = scheduler._batch.slots.decode

    def hang(*args: object) -> object:
        hung.wait(LONGEST)
        return decode(*args)

    monkeypatch.setattr(scheduler._batch.slots, "decode", hang)
    assert scheduler.problem(0.01) == ""
    scheduler.submit(request(generator, sample=SampleConfig(max_tokens=2, min_tokens=2)), reader)
    wait_for(lambda: "has been in one step" in scheduler.problem(0.01))
    assert scheduler.problem(LONGEST) == ""
    hung.set()
    assert reader.done().reason == "length"
    wait_for(lambda: scheduler.problem(LONGEST) == "")
    monkeypatch.setattr(scheduler._batch.slots, "decode", lambda *_: 1 // 0)
    for _ in range(3):
        reader = Reader()
        scheduler.submit(request(generator), reader)
        assert reader.done().reason == "error"
    assert scheduler.problem(LONGEST) == "the model's last 3 steps failed; restart the server"
    monkeypatch.setattr(scheduler._batch, "step", lambda: sys.exit(1))
    reader = Reader()
    scheduler.submit(request(generator), reader)
    assert reader.done() == Done("error", 0, "", "the model's thread has died; restart the server")
    wait_for(lambda: "thread has died" in scheduler.problem(LONGEST))
    with pytest.raises(TextmillError, match="thread has died"):
        scheduler.submit(request(generator), Reader())
    scheduler.close(LONGEST)


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
    """A scheduler of texts, and one of encoder requests."""
    if request.param == "scheduler":
        scheduler = Scheduler(generator, slots=2, queue=2)
        case = Case(scheduler, generator.new_request("The mill", LONG))
        decode = scheduler._batch.slots.decode
        scheduler._batch.slots.decode = lambda *args: (case.check_exit(), decode(*args))[1]  # type: ignore[method-assign]
    else:
        net = SimpleNamespace(head=SimpleNamespace(device=SimpleNamespace(type="cpu")))
        texts = SimpleNamespace(dimension=1)
        embed_ids = lambda ids: (case.check_exit(), np.zeros((len(ids), 1), np.float32))[1]  # noqa: E731
        embedder: Any = SimpleNamespace(net=net, texts=texts, embed_ids=embed_ids)
        encoder = EncoderBatch(embedder, None)
        case = Case(Scheduler(None, encoder, slots=2, queue=2), EmbedRequest(((1,) * 512,) * 100_000))
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
    assert case.thread.stats().active == case.thread.stats().waiting == 0


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
    case = Case(Scheduler(generator, slots=2, queue=2), generator.new_request("The mill", LONG))
    monkeypatch.setattr(case.thread._batch, "drop", lambda *_: 1 // 0)
    numbers = [case.submit() for _ in range(3)]
    case.thread.cancel(numbers[0])
    assert [case.next_end().reason for _ in numbers] == ["error"] * 3
