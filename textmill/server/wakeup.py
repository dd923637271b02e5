"""WakeupQueue: how what a thread delivers comes to the event loop, which is woken once for all that has come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from textmill.generation.text_chunks import TextChunk

Take = Callable[[TextChunk], None]


class WakeupQueue:
    """Parts of texts on their way from the scheduler's thread to those who wait in the event loop."""

    def __init__(self) -> None:
        self._come, self._rung = deque[tuple[Take, TextChunk]](), False

    def put(self, loop: asyncio.AbstractEventLoop, take: Take, part: TextChunk) -> None:
        """Have the loop call `take` with a part; from any thread."""
        # First the part, then the flag, as the loop reads them the other way round.
        self._come.append((take, part))
        if not self._rung:
            self._rung = True
            try:
                loop.call_soon_threadsafe(self._hand_out)
            except RuntimeError:
                self._rung = False  # the loop is closed: nobody waits any more

    def _hand_out(self) -> None:
        self._rung = False
        while self._come:
            take, part = self._come.popleft()
            take(part)
