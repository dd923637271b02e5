"""Steps are reported when they are finished, with the throughput of finished work."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from textmill.training.timing import StepLog


@dataclass
class Device:
    """A fake device that computes its steps in order, 2 s each; the clock advances when the host waits, or by hand."""

    now: float = 0.0
    busy: float = 0.0
    reported: list[tuple[int, float]] = field(default_factory=list)

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
    monkeypatch.setattr("textmill.training.timing.time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def new_log(device: Device) -> Any:
    run_length: Any = SimpleNamespace(tokens_after=lambda done: 400 * done)
    return StepLog(run_length, 0, lambda done, result, rate: device.reported.append((done, rate)))


def test_throughput_includes_the_wait_for_the_device(device: Device) -> None:
    """The host queues ten steps before the device finishes one; 400 tokens in 2 s are 200 per second."""
    log = new_log(device)
    results = [device.step() for _ in range(10)]
    log.add(10, results[-1])
    assert device.reported == [], "its loss is not ready"
    device.step()
    log.flush()
    assert device.reported == [(10, pytest.approx(200.0))]
    assert device.now == 20.0, "the next step was not waited for"


def test_a_ready_step_is_reported_at_once(device: Device) -> None:
    log, result = new_log(device), device.step()
    device.now = 4.0
    log.add(1, result)
    assert device.reported == [(1, pytest.approx(100.0))]
    log.flush()
    assert len(device.reported) == 1


def test_a_pause_starts_after_the_step_and_is_not_counted(device: Device) -> None:
    log = new_log(device)
    results = [device.step(), device.step()]
    log.add(1, results[0])
    with log.paused(results[1]):
        assert device.reported == [(1, pytest.approx(200.0))]
        assert device.now == 4.0
        device.now += 50.0
    log.add(3, device.step())
    log.flush()
    assert device.reported[1:] == [(3, pytest.approx(200.0))]
