"""What the server counts, told as Prometheus reads it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Upper ends of the classes that times are counted in."""


class Histogram:
    """Times, counted by class."""

    def __init__(self) -> None:
        self.classes, self.total, self.count = [0] * len(SECONDS), 0.0, 0

    def add(self, seconds: float) -> None:
        """Count one time."""
        self.total += seconds
        self.count += 1
        for place, end in enumerate(SECONDS):
            self.classes[place] += seconds <= end

    def lines(self, name: str, told: str) -> list[str]:
        """The histogram as Prometheus reads it."""
        classes = [f'{name}_bucket{{le="{end}"}} {count}' for end, count in zip(SECONDS, self.classes, strict=True)]
        return [*_head(name, "histogram", told), *classes, f'{name}_bucket{{le="+Inf"}} {self.count}',
                f"{name}_sum {self.total:.6f}", f"{name}_count {self.count}"]  # fmt: skip


class Metrics:
    """Counts of one server, kept by its event loop alone."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, int]] = Counter()
        self.prompt_tokens = self.new_tokens = self.refused = self.left = self.timeouts = 0
        self.connections = self.crowded = self.slow = 0
        self.seconds, self.first = Histogram(), Histogram()
        self._last: deque[float] = deque(maxlen=64)

    def add_texts(self, prompt: int, new: int, seconds: float) -> None:
        """Count a request for text that was answered."""
        self.prompt_tokens += prompt
        self.new_tokens += new
        self.seconds.add(seconds)
        self._last.append(seconds)

    def mean_seconds(self) -> float:
        """How long the last requests for text took; one second where there were none."""
        return sum(self._last) / len(self._last) if self._last else 1.0

    def text(self, stats: Mapping[str, int | float], name: str, step: int) -> str:
        """Everything, as Prometheus reads it."""
        lines = _head("textmill_model_info", "gauge", "The model that answers.")
        lines.append(f'textmill_model_info{{model="{_escaped(name)}",step="{step}"}} 1')
        gauges = [("active", "Texts being made."), ("waiting", "Texts waiting for a slot."), ("slots", "Texts that can be made at a time."),
                  ("queue", "Texts that may wait.")]  # fmt: skip
        for key, told in gauges:
            lines += [*_head(f"textmill_{key}", "gauge", told), f"textmill_{key} {stats[key]}"]
        lines += [
            *_head("textmill_connections", "gauge", "Open connections."),
            f"textmill_connections {self.connections}",
        ]
        counts = [
            ("generated_tokens", stats["tokens"], "Tokens made, those of requests that ended early included."),
            ("scheduled", stats["requests"], "Texts asked of the model."), ("cancelled", stats["cancelled"], "Texts that were cancelled."),
            ("prompt_tokens", self.prompt_tokens, "Tokens of prompts that were answered."),
            ("answered_tokens", self.new_tokens, "New tokens that were answered with."),
            ("refused", self.refused, "Requests refused because the queue was full."),
            ("clients_left", self.left, "Clients that left before their answer was whole."),
            ("timeouts", self.timeouts, "Texts that their time limit ended."),
            ("connections_crowded", self.crowded, "Connections ended or refused because there were too many."),
            ("connections_slow", self.slow, "Connections ended because their clients sent or read too slowly."),
        ]  # fmt: skip
        for key, count, told in counts:
            lines += [*_head(f"textmill_{key}_total", "counter", told), f"textmill_{key}_total {count}"]
        lines += _head("textmill_http_requests_total", "counter", "Requests by method, path and status.")
        for (method, path, status), count in sorted(self.requests.items()):
            lines.append(
                f'textmill_http_requests_total{{method="{method}",path="{_escaped(path)}",status="{status}"}} {count}'
            )
        lines += self.seconds.lines("textmill_request_seconds", "Time of a request for text, waiting included.")
        lines += self.first.lines("textmill_first_token_seconds", "Time to the first token of a streamed text.")
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, told: str) -> list[str]:
    return [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
