"""Counts and times of the server, in Prometheus format.

Written by hand: prometheus_client would be another dependency, and declaring these metrics with it takes as many lines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from textmill.generation.requests import ModelStats

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper bounds of the histogram buckets, in seconds."""


class Histogram:
    """Counts times by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * len(BUCKETS)
        self.total = 0.0
        self.count = 0

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.total += seconds
        self.count += 1
        for index, bound in enumerate(BUCKETS):
            self.counts[index] += seconds <= bound

    def to_lines(self, name: str, description: str) -> list[str]:
        """Return the histogram in Prometheus format."""
        buckets = [f'{name}_bucket{{le="{bound}"}} {count}' for bound, count in zip(BUCKETS, self.counts, strict=True)]
        return [
            *_head(name, "histogram", description),
            *buckets,
            f'{name}_bucket{{le="+Inf"}} {self.count}',
            f"{name}_sum {self.total:.6f}",
            f"{name}_count {self.count}",
        ]


class Metrics:
    """The counts of one server; only its event loop may change them."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.prompt_tokens = self.reused_tokens = self.new_tokens = self.refused = self.disconnects = self.timeouts = 0
        self.connections = self.crowded = self.slow = 0
        self.seconds = Histogram()
        self.first_token = Histogram()
        self._recent_seconds: deque[float] = deque(maxlen=64)

    def add_texts(self, prompt: int, new: int, seconds: float, reused: int = 0) -> None:
        """Count a generation request that was answered."""
        self.prompt_tokens += prompt
        self.reused_tokens += reused
        self.new_tokens += new
        self.seconds.add(seconds)
        self._recent_seconds.append(seconds)

    def mean_seconds(self) -> float:
        """Return the mean time of recent generation requests; one second if there were none."""
        return sum(self._recent_seconds) / len(self._recent_seconds) if self._recent_seconds else 1.0

    def to_text(self, stats: ModelStats, steps: Mapping[str, int]) -> str:
        """Return all metrics in Prometheus format; `steps` are those of the models that are loaded."""
        lines = _head("textmill_model_info", "gauge", "The models in memory.")
        lines += [f'textmill_model_info{{model="{_escape(name)}",step="{step}"}} 1' for name, step in steps.items()]
        gauges = [
            ("active", stats.active, "Texts being generated."),
            ("waiting", stats.waiting, "Texts waiting for a slot."),
            ("slots", stats.slots, "Texts that can be generated at a time."),
            ("queue", stats.queue, "Texts that may wait."),
            ("connections", self.connections, "Open connections."),
        ]
        for key, value, description in gauges:
            lines += [*_head(f"textmill_{key}", "gauge", description), f"textmill_{key} {value}"]
        counters = [
            ("generated_tokens", stats.tokens, "Tokens generated, including those of requests that ended early."),
            ("scheduled", stats.requests, "Texts submitted to the model."),
            ("cancelled", stats.cancelled, "Texts that were cancelled."),
            ("prompt_tokens", self.prompt_tokens, "Prompt tokens of answered requests."),
            ("reused_tokens", self.reused_tokens, "Those of them that an earlier text begins with too (prefix cache)."),
            ("answered_tokens", self.new_tokens, "New tokens of answered requests."),
            ("refused", self.refused, "Requests refused because the queue was full."),
            ("clients_left", self.disconnects, "Clients that disconnected before their reply was complete."),
            ("timeouts", self.timeouts, "Texts that reached their time limit."),
            ("connections_crowded", self.crowded, "Connections closed or refused because there were too many."),
            ("connections_slow", self.slow, "Connections closed because the client sent or read too slowly."),
        ]
        for key, count, description in counters:
            lines += [*_head(f"textmill_{key}_total", "counter", description), f"textmill_{key}_total {count}"]
        lines += _head("textmill_http_requests_total", "counter", "Requests by method, path and status.")
        for (method, path, status), count in sorted(self.requests.items()):
            labels = f'method="{method}",path="{_escape(path)}",status="{status}"'
            lines.append(f"textmill_http_requests_total{{{labels}}} {count}")
        lines += self.seconds.to_lines("textmill_request_seconds", "Time of a generation request, including waiting.")
        lines += self.first_token.to_lines(
            "textmill_first_token_seconds", "Time to the first token of a streamed text."
        )
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, description: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
