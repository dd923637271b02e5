"""Turns: a lock that threads get in the order of their requests (a ticket lock)."""

from __future__ import annotations

import threading


class Turns:
    """Used as a context manager by threads that share a model: none of them starves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tickets = self._served = 0

    def __enter__(self) -> None:
        with self._changed:
            mine = self._tickets
            self._tickets += 1
            self._changed.wait_for(lambda: self._served == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._served += 1
            self._changed.notify_all()
