"""Steps are told of when they are done, at the rate of work that is done, whoever waits for it where."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from textmill.training.step_log import StepLog


@dataclass
class Device:
    """Works through its steps one after the other, 2 s each; the host's clock moves when somebody waits for it, or by itself."""

    now: float = 0.0
    busy: float = 0.0
    told: list[tuple[int, float]] = field(default_factory=list)

    def step(self) -> Result:
        self.busy = max(self.busy, self.now) + 2.0
        return Result(self, self.busy)


@dataclass
class Result:
    device: Device
    end: float

    @property
    def ready(self) -> bool:
        return self.device.now >= self.end

    @property
    def loss(self) -> float:
        self.device.now = max(self.device.now, self.end)
        return 1.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("textmill.training.step_log.time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def _book(device: Device) -> StepLog[Result]:
    course: Any = SimpleNamespace(samples=lambda done: 4 * done, length=100)
    return StepLog(course, 0, lambda done, result, rate: device.told.append((done, rate)))


def test_a_rate_counts_the_wait_for_the_device(device: Device) -> None:
    """The host is through with ten steps before the device is with one; 400 tokens of each in 2 s are 200 a second."""
    book = _book(device)
    results = [device.step() for _ in range(10)]
    book.enter(10, results[-1])
    assert device.told == [], "its numbers have not come"
    device.step()
    book.write()
    assert device.told == [(10, pytest.approx(200.0))]
    assert device.now == 20.0, "the step after it was not waited for"


def test_what_has_come_is_told_at_once(device: Device) -> None:
    book, result = _book(device), device.step()
    device.now = 4.0
    book.enter(1, result)
    assert device.told == [(1, pytest.approx(100.0))]
    book.write()
    assert len(device.told) == 1


def test_a_pause_begins_after_the_step_and_counts_for_none(device: Device) -> None:
    book = _book(device)
    results = [device.step(), device.step()]
    book.enter(1, results[0])
    with book.paused(results[1]):
        assert device.told == [(1, pytest.approx(200.0))]
        assert device.now == 4.0
        device.now += 50.0
    book.enter(3, device.step())
    book.write()
    assert device.told[1:] == [(3, pytest.approx(200.0))]
